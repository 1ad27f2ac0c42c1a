"""What is published: both distributions, the compiled emulated device that starts without a compiler, and no wheel without one."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Build, Guest

ROOT = Path(__file__).parents[2]
_SCRIPT = re.compile(r"^```python\n(import torch, torch_npu, npugraph_ex\n.*?)^```$", re.MULTILINE | re.DOTALL)


def _pip(*arguments: str | Path) -> None:
    command = [sys.executable, "-m", "pip", *map(str, arguments), "--quiet", "--no-deps", "--no-index"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_no_compiler_is_needed(tmp_path: Path, build_wheel: Build, make_guest: Callable[..., Guest]) -> None:
    """The source distribution gives a wheel; pip installs it, and the README's script runs with nothing on PATH.

    The emulated device that the wheel brings is used: nothing comes into the cache of compiled devices.
    """
    build_wheel(tmp_path, "sdist").check_returncode()
    _pip("wheel", "--no-build-isolation", "--wheel-dir", tmp_path, *tmp_path.glob("*.tar.gz"))
    (wheel,) = tmp_path.glob("*.whl")
    assert re.search(r"-py3-none-manylinux_2_\d+_(x86_64|aarch64)\.whl$", wheel.name)
    needed = "torch torch_npu pyyaml numpy packaging pyelftools tabulate rich jinja2 markupsafe"
    guest = make_guest(*needed.split(), unpacked=None)
    _pip("--python", guest.folder / "bin" / "python", "install", wheel)
    (script,) = _SCRIPT.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    guest.write({"script.py": script})
    cache = guest.work / "cache"
    command = str(guest.folder / "bin" / "npugraph-ex")
    done = guest.run(command, "run", "--emulate", "script.py", PATH="/nonexistent", NPU_EMULATOR_CACHE=str(cache))
    assert (done.returncode, done.stdout) == (0, "eager and compiled agree\n"), done.stderr
    assert "1 emulated Ascend910B2" in done.stderr
    assert not cache.exists()


def test_a_wheel_is_not_built_without_a_compiler(tmp_path: Path, build_wheel: Build) -> None:
    """The build stops and says what to install, and how to do without."""
    done = build_wheel(tmp_path, PATH="/nonexistent", CXX="")
    assert done.returncode != 0
    assert re.search(r"no C\+\+ compiler found[\s\S]*apt-get install g\+\+[\s\S]*NPU_EMULATOR_COMPILED=0", done.stderr)
    assert not list(tmp_path.iterdir())
