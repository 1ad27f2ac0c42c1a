"""What the emulator's tests share: the emulated device, and programs in processes of their own."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from weakref import WeakKeyDictionary

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


@pytest.fixture(autouse=True)
def _failed_captures_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make torch_npu's allocator leave a capture that the device refuses to end: 2.10 does not, and all later captures fail."""
    import torch

    from npugraph_ex.versions.failed_captures import DIFFERENCE, leave_capture

    if not DIFFERENCE.older:
        return
    begin, end = torch.npu.NPUGraph.capture_begin, torch.npu.NPUGraph.capture_end
    pools: WeakKeyDictionary[torch.npu.NPUGraph, object] = WeakKeyDictionary()

    def begin_in_a_known_pool(graph: torch.npu.NPUGraph, pool: object = None, **options: object) -> None:
        pools[graph] = torch.npu.graph_pool_handle() if pool is None else pool
        begin(graph, pools[graph], **options)

    def end_and_leave(graph: torch.npu.NPUGraph) -> None:
        try:
            end(graph)
        except RuntimeError:
            leave_capture(torch.npu.current_device(), pools[graph])
            raise

    monkeypatch.setattr(torch.npu.NPUGraph, "capture_begin", begin_in_a_known_pool)
    monkeypatch.setattr(torch.npu.NPUGraph, "capture_end", end_and_leave)


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
