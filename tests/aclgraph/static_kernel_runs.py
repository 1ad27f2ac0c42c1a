"""What the tests of static kernels share: a run compared with eager, what it left behind, waiting for other processes."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import device_helpers
import pytest
import torch

from npu_emulator import build


def root() -> Path:
    """Where static kernels are kept."""
    return Path(os.environ["NPUGRAPH_EX_CACHE"]) / "static_kernels"


def processes() -> list[Path]:
    """The folders of processes that hold static kernels."""
    return list((root() / "processes").iterdir())


def choice_of_cann() -> tuple[int, str]:
    """How often this process had static kernels chosen anew, and the folder that it named the last time."""
    runtime = ctypes.CDLL(str(build.libraries()[0]))
    runtime.emu_static_kernel_selections.restype = ctypes.c_uint64
    runtime.emu_static_kernel_folder.restype = ctypes.c_char_p
    return runtime.emu_static_kernel_selections(), runtime.emu_static_kernel_folder().decode()


def model(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Two products of one signature, an addition, and a sum."""
    return (x @ w + x) @ w


def run(*sizes: int, function: Callable[..., Any] = model, dynamic: bool | None = False, **options: Any) -> None:
    """Compile with static kernels, call with each size, compare everything with eager."""
    w = torch.randn(4, 4, device="npu")
    calls = [(torch.randn(size, 4, device="npu"), w) for size in sizes]
    device_helpers.check(function, calls, dynamic=dynamic, static_kernel_compile=True, **options)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the library warned of."""
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def is_alive(group: int) -> bool:
    """Whether a process of a group still runs; one that ended and that nobody has asked about does not."""
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, its_group = status.read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state != "Z":
                return True
    return False


def wait_until(condition: Callable[[], bool], seconds: float = 900) -> None:
    """Wait for another process, not for ever."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "waited too long"
        time.sleep(0.02)
