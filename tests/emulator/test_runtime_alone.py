"""The emulated runtime without Python and torch: its C++ tests, under sanitizers, and on aarch64 by an emulated processor."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

import npu_emulator
from npu_emulator.build import compiler, torch_npu_folder

RUNTIME = Path(npu_emulator.__file__).parent / "runtime"
TESTS = Path(__file__).parent / "runtime" / "runtime_test.cpp"
ARM = ("aarch64-linux-gnu-g++", "qemu-aarch64")


def built(command: list[str], target: Path) -> Path:
    """The runtime and its tests as one program."""
    include = torch_npu_folder() / "include" / "third_party" / "acl" / "inc"
    folders = [f"-I{folder}" for folder in (include, include / "acl", RUNTIME)]
    sources = [str(RUNTIME / "runtime.cpp"), str(TESTS)]
    subprocess.run([*command, "-std=c++17", *folders, *sources, "-o", str(target), "-pthread"], check=True)
    return target


def run(command: list[str]) -> None:
    """Run it; its output is the failure's text."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"LANG": "C"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "graphs_are_captured_and_replayed_side_by_side" in done.stdout


@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_sanitizers_find_nothing(sanitizer: str, tmp_path: Path) -> None:
    """Threads that launch, capture, replay, wait for events and allocate side by side."""
    flags = [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", "-g1"]
    run([str(built([*compiler(), *flags], tmp_path / "tests"))])


def test_pages_of_64_kib(tmp_path: Path) -> None:
    """Memory is given back in pages of the machine's size; a neighbour on the last page keeps its own."""
    run([str(built([*compiler(), "-DPAGE=65536"], tmp_path / "tests"))])


@pytest.mark.skipif(not all(map(shutil.which, ARM)), reason="needs Debian's g++-aarch64-linux-gnu and qemu-user")
def test_the_runtime_works_on_aarch64(tmp_path: Path) -> None:
    """The same program, on an emulated processor."""
    run([ARM[1], str(built([ARM[0], "-static", "-O1"], tmp_path / "tests"))])
