"""Priorities of streams: CANN's eight, which `lazy` honours and no result may depend on.

torch_npu 2.13 gives every stream of its own CANN's priority 0 and cannot tell it; streams made in C keep theirs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch

from npu_emulator import detect_races, every_order, kernel_counts, schedule
from npugraph_ex.versions import missing_interfaces

Pair = tuple[torch.npu.Stream, torch.npu.Stream]


@pytest.fixture
def pair(acl: ctypes.CDLL) -> Iterator[Pair]:
    """Create a stream of the lowest priority and one of the highest."""
    if missing_interfaces.DIFFERENCE.older:
        pytest.skip(missing_interfaces.DIFFERENCE.what)
    handles = [ctypes.c_void_p(), ctypes.c_void_p()]
    for handle, priority in zip(handles, (7, 0), strict=True):
        assert acl.aclrtCreateStreamWithConfig(ctypes.byref(handle), priority, 0) == 0
    low, high = (torch.npu.ExternalStream(handle.value) for handle in handles)
    yield low, high
    for handle in handles:
        assert acl.aclrtDestroyStream(handle) == 0


def test_priorities_are_kept_and_have_a_range(acl: ctypes.CDLL) -> None:
    """The range is CANN's 0..7, the smallest the most urgent; a stream tells its own; beyond the range is 107000."""
    least, greatest, found, handle = ctypes.c_int32(), ctypes.c_int32(), ctypes.c_uint32(), ctypes.c_void_p()
    assert acl.aclrtDeviceGetStreamPriorityRange(ctypes.byref(least), ctypes.byref(greatest)) == 0
    assert (least.value, greatest.value) == (7, 0)
    for priority in (0, 3, 7):
        assert acl.aclrtCreateStreamWithConfig(ctypes.byref(handle), priority, 0) == 0
        assert acl.aclrtStreamGetPriority(handle, ctypes.byref(found)) == 0
        assert found.value == priority
        assert acl.aclrtDestroyStream(handle) == 0
    assert acl.aclrtCreateStreamWithConfig(ctypes.byref(handle), 8, 0) == 107000
    assert b"must lie in 0..7, got 8; choose one" in acl.aclGetRecentErrMsg()


def test_streams_of_torch_npu_have_one_priority(acl: ctypes.CDLL) -> None:
    """`torch.npu.Stream(priority=-1)` is a stream like any other: torch_npu passes priority 0 to CANN for all of them."""
    found = ctypes.c_uint32(9)
    for priority in (-1, 0, 1):
        stream = torch.npu.Stream(priority=priority)
        assert acl.aclrtStreamGetPriority(ctypes.c_void_p(stream.npu_stream), ctypes.byref(found)) == 0
        assert found.value == 0
        with torch.npu.stream(stream):
            value = torch.ones(1, device="npu") + 1
        stream.synchronize()
        assert value.item() == 2


def _race(pair: Pair) -> float:
    """Launch two writes that nothing orders, the one on the stream of low priority first."""
    low, high = pair
    x = torch.ones(1, device="npu")
    torch.npu.synchronize()
    with torch.npu.stream(low):
        x.mul_(10)
    with torch.npu.stream(high):
        x.add_(1)
    torch.npu.synchronize()
    return x.item()


def test_lazy_runs_the_more_urgent_stream_first(pair: Pair) -> None:
    """Of what is ready when the device is waited for, the highest priority goes first; `fifo` stays in launch order."""
    with schedule("lazy"):
        assert _race(pair) == 20
    assert _race(pair) == 11


def test_a_wait_for_one_stream_comes_before_priorities(acl: ctypes.CDLL, pair: Pair) -> None:
    """`lazy` runs what the waiter needs, whatever is more urgent elsewhere."""
    low, high = pair
    x, y = torch.ones(1, device="npu"), torch.ones(1, device="npu")
    torch.npu.synchronize()
    with schedule("lazy"):
        with torch.npu.stream(high):
            y.mul_(3)
        with torch.npu.stream(low):
            x.add_(1)
        before = kernel_counts()
        assert acl.aclrtSynchronizeStream(ctypes.c_void_p(low.npu_stream)) == 0
        ran = {name for name, count in kernel_counts().items() if count != before.get(name, 0)}
        assert ran == {"aten.add_.Tensor"}
        torch.npu.synchronize()
    assert (x.item(), y.item()) == (2, 3)


def test_no_order_is_hidden_by_priorities(pair: Pair) -> None:
    """Every order is still tried, random schedules meet both, and the race is reported as ever."""
    assert {result for _, result in every_order(lambda: _race(pair))} == {11, 20}
    found = set()
    for seed in range(8):
        with schedule(f"random:{seed}"):
            found.add(_race(pair))
    assert found == {11, 20}
    with detect_races() as races:
        _race(pair)
    assert len(races) == 1


@pytest.mark.parametrize("order", ["fifo", "lazy", "random:1", "pct:2:2"])
def test_an_event_goes_before_a_priority(acl: ctypes.CDLL, pair: Pair, order: str) -> None:
    """A more urgent stream that waits for a less urgent one waits."""
    low, high = pair
    x, event = torch.ones(1, device="npu"), ctypes.c_void_p()
    assert acl.aclrtCreateEvent(ctypes.byref(event)) == 0
    torch.npu.synchronize()
    with schedule(order):
        with torch.npu.stream(low):
            x.mul_(10)
        assert acl.aclrtRecordEvent(event, ctypes.c_void_p(low.npu_stream)) == 0
        assert acl.aclrtStreamWaitEvent(ctypes.c_void_p(high.npu_stream), event) == 0
        with torch.npu.stream(high):
            x.add_(1)
        torch.npu.synchronize()
        assert x.item() == 11
    assert acl.aclrtDestroyEvent(event) == 0
