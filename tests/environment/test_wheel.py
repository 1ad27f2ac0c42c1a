"""The wheel with the compiled emulated device: it starts where there is no compiler, and is not built without one."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from conftest import Build, Guest

_PROGRAM = """
import torch
x = torch.arange(4.0, device="npu")
graph = torch.npu.NPUGraph()
with torch.npu.graph(graph):
    y = x * 2
x += 1
graph.replay()
print(y.sum().item(), torch.npu.get_device_name())
"""


def test_no_compiler_is_needed(tmp_path: Path, build_wheel: Build, make_guest: Callable[..., Guest]) -> None:
    """With nothing on PATH the device starts, captures and replays, and nothing comes into the cache of compiled devices."""
    build_wheel(tmp_path).check_returncode()
    (wheel,) = tmp_path.glob("*.whl")
    assert re.search(r"-py3-none-manylinux_2_\d+_(x86_64|aarch64)\.whl$", wheel.name)
    guest = make_guest("torch", "torch_npu", "packaging", "pyelftools", "tabulate", "rich", wheel=wheel)
    guest.write({"program.py": _PROGRAM})
    cache = guest.work / "cache"
    done = guest.run("-m", "npu_emulator", "program.py", PATH="/nonexistent", NPU_EMULATOR_CACHE=str(cache))
    assert (done.returncode, done.stdout) == (0, "20.0 Ascend910B2 (emulated)\n"), done.stderr
    assert not cache.exists()


def test_a_wheel_is_not_built_without_a_compiler(tmp_path: Path, build_wheel: Build) -> None:
    """The build stops and says what to install, and how to do without."""
    done = build_wheel(tmp_path, PATH="/nonexistent", CXX="")
    assert done.returncode != 0
    assert re.search(r"no C\+\+ compiler found[\s\S]*apt-get install g\+\+[\s\S]*NPU_EMULATOR_COMPILED=0", done.stderr)
    assert not list(tmp_path.iterdir())
