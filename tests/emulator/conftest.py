"""What the emulator's tests share: the emulated device, and programs in processes of their own."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import npu_emulator
from npu_emulator import build

Program = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(autouse=True)
def _emulated() -> None:
    """Skip on a machine with a real device: these tests are about the emulated one."""
    if not npu_emulator.is_active():
        pytest.skip("the emulated device is not active")


@pytest.fixture(autouse=True)
def _own_stream() -> Iterator[None]:
    """Go back to the current stream: a capture that fails at its end leaves torch on the capturing stream."""
    import torch

    before = torch.npu.current_stream()
    yield
    torch.npu.set_stream(before)


@pytest.fixture
def program(tmp_path: Path, fresh_environment: Callable[..., dict[str, str]]) -> Program:
    """Run a program text under `python -m npu_emulator [options]` in a new process and return how it ended."""

    def run(
        text: str, *options: str, arguments: tuple[str, ...] = (), **variables: str
    ) -> subprocess.CompletedProcess[str]:
        script = tmp_path / "program.py"
        script.write_text(text)
        command = [sys.executable, "-m", "npu_emulator", *options, str(script), *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=900, env=fresh_environment(**variables)
        )

    return run


@pytest.fixture
def acl() -> ctypes.CDLL:
    """Return the runtime as C programs see it."""
    library = ctypes.CDLL(str(build.libraries()[0]))
    library.aclGetRecentErrMsg.restype = ctypes.c_char_p
    return library
