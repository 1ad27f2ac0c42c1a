"""What each capture mode forbids whom, and captures beside and across one another."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch


def read_elsewhere() -> float:
    """Read a value on another stream than the captured one."""
    with torch.npu.stream(torch.npu.Stream()):
        return torch.ones(3, device="npu").sum().item()


def copy_elsewhere() -> float:
    """Copy from the host to a stream other than the captured one, blocking."""
    with torch.npu.stream(torch.npu.Stream()):
        return float(torch.ones(3).to("npu").numel())


def outcome(action: Callable[[], object], *, other_thread: bool) -> str:
    """Tell how an action ends in this or another thread: `fine`, or the code it is refused with."""
    found: list[str] = []

    def run() -> None:
        try:
            assert action() == 3.0
        except RuntimeError as error:
            found.append("107030" if "107030" in str(error) else str(error))
        else:
            found.append("fine")

    if other_thread:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    else:
        run()
    return found[0]


@pytest.mark.parametrize(
    ("mode", "here", "there"),
    [("global", "107030", "107030"), ("thread_local", "107030", "fine"), ("relaxed", "fine", "fine")],
)
def test_who_may_read_during_a_capture(mode: str, here: str, there: str) -> None:
    """`global` forbids reads and blocking copies to every thread, `thread_local` to the capturing one, `relaxed` to none."""
    x = torch.ones(3, device="npu")
    graph = torch.npu.NPUGraph()
    # A stream of its own: torch_npu hands out its 32 streams in turn, and `elsewhere` must not mean the captured one.
    with torch.npu.graph(graph, stream=torch.npu.Stream(), capture_error_mode=mode):
        y = x + 1
        for action in (read_elsewhere, copy_elsewhere):
            assert outcome(action, other_thread=False) == here
            assert outcome(action, other_thread=True) == there
    graph.replay()
    assert y.cpu().tolist() == [2, 2, 2]


@pytest.mark.parametrize("action", [read_elsewhere, copy_elsewhere])
def test_who_is_refused_by_another_threads_capture_learns_of_the_mode(action: Callable[[], object]) -> None:
    """The thread that is refused names the mode that the capturing one should have; the capturing one is told to move the call."""

    def refusal() -> str:
        with pytest.raises(RuntimeError, match="107030") as refused:
            action()
        return str(refused.value)

    with ThreadPoolExecutor(1) as pool, torch.npu.graph(torch.npu.NPUGraph(), stream=torch.npu.Stream()):
        there, here = pool.submit(refusal).result(), refusal()
    assert 'give that capture capture_error_mode="thread_local"' in there
    assert "out of the captured region" in here
    assert "thread_local" not in here


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_no_mode_lets_the_host_wait_for_the_captured_stream(mode: str) -> None:
    """A read through the captured stream cannot be served before a replay, so it is refused and not answered wrongly."""
    x = torch.ones(3, device="npu")
    with torch.npu.graph(torch.npu.NPUGraph(), capture_error_mode=mode):
        y = x + 1
        assert outcome(lambda: y.sum().item(), other_thread=False) == "107030"
        assert outcome(torch.npu.current_stream().synchronize, other_thread=False) == "107030"


def test_two_captures_side_by_side() -> None:
    """Captures on two streams that do not meet are two graphs, each with its own work."""
    x = torch.ones(2, device="npu")
    first, second = torch.npu.NPUGraph(), torch.npu.NPUGraph()
    one, two = torch.npu.Stream(), torch.npu.Stream()
    torch.npu.synchronize()
    with torch.npu.stream(one):
        first.capture_begin()
        a = x + 1
        with torch.npu.stream(two):
            second.capture_begin()
            b = x + 2
            second.capture_end()
        first.capture_end()
    x.fill_(10)
    torch.npu.synchronize()
    first.replay()
    assert a.cpu().tolist() == [11, 11]
    second.replay()
    assert b.cpu().tolist() == [12, 12]


def test_a_wait_across_captures_is_refused_and_ruins_the_other() -> None:
    """Waiting in one capture for an event of another is 107032; the capture that owns the event ends with 107026."""
    x = torch.ones(2, device="npu")
    first, second = torch.npu.NPUGraph(), torch.npu.NPUGraph()
    one, two = torch.npu.Stream(), torch.npu.Stream()
    torch.npu.synchronize()
    with torch.npu.stream(one):
        first.capture_begin()
        kept = x + 1
        event = torch.npu.Event()
        event.record(one)
        with torch.npu.stream(two):
            second.capture_begin()
            with pytest.raises(RuntimeError, match=r"(?s)107032.*another capture.*record the event in this one"):
                event.wait(two)
            second.capture_end()
        with pytest.raises(RuntimeError, match="107026"):
            first.capture_end()
    del kept
    assert torch.ones(2, device="npu").sum().item() == 2
