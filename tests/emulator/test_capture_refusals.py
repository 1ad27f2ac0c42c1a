"""What a capture refuses: each error has its code, the operation, and the Python line that asked for it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from npu_emulator import schedule
from npugraph_ex.versions import captured_generators

Action = Callable[[torch.Tensor, torch.npu.Event], object]

REFUSED: dict[str, tuple[int, str, Action]] = {
    "item": (107030, "item()", lambda x, _: x.sum().item()),
    "to the host": (107030, "a copy to the host", lambda x, _: x.cpu()),
    "from the host": (107030, "aten.copy_.default", lambda x, _: x.copy_(torch.ones(3))),
    "device": (107030, "torch_npu.npu.utils.synchronize", lambda *_: torch.npu.synchronize()),
    "stream": (107030, "Stream.synchronize", lambda *_: torch.npu.current_stream().synchronize()),
    "event": (107030, "Event.synchronize", lambda _, event: event.synchronize()),
    "cache": (107030, "torch_npu.npu.memory.empty_cache", lambda *_: torch.npu.empty_cache()),
    **(
        {}  # torch_npu refuses it before CANN is asked
        if captured_generators.DIFFERENCE.older
        else {"replay": (107030, "aclmdlRIExecuteAsync", lambda *_: READY[0].replay())}
    ),
    "stream query": (107027, "Stream.query", lambda *_: torch.npu.current_stream().query()),
    "event query": (107028, "Event.query", lambda _, event: event.query()),
}
"""What is refused: by which code, as which operation."""
READY: list[torch.npu.NPUGraph] = []


@pytest.fixture(autouse=True)
def _ready() -> object:
    """Capture a graph that may be replayed."""
    READY.append(torch.npu.NPUGraph())
    with torch.npu.graph(READY[0]):
        torch.ones(3, device="npu")
    yield
    READY.clear()


def test_what_starts_a_program_is_no_line_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command says so of itself: an error names the line of the program that it runs, or none."""
    starter = ModuleType("starter_of_a_test")
    exec("__npu_emulator_starts__ = True\ndef start(program):\n    return program()\n", starter.__dict__)  # noqa: S102
    monkeypatch.setitem(sys.modules, starter.__name__, starter)
    x, graph, said = torch.ones(3, device="npu"), torch.npu.NPUGraph(), []
    with torch.npu.graph(graph):
        for program in (x.cpu, lambda: [x.cpu()]):
            with pytest.raises(RuntimeError, match="107030") as refused:
                starter.start(program)
            said.append(str(refused.value))
    assert "Python line" not in said[0]
    assert f"Python line: {__file__}:" in said[1]


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_names_the_operation_and_its_line(name: str) -> None:
    """Whatever path it took, through Python or torch_npu's C++; the capture goes on and its graph is whole."""
    code, operation, action = REFUSED[name]
    x, graph = torch.ones(3, device="npu"), torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        y = x + 1
        event = torch.npu.current_stream().record_event()
        with pytest.raises(RuntimeError) as refused:
            action(x, event)
        z = y * 10
    text = str(refused.value)
    assert str(code) in text
    assert operation in text
    assert f"Python line: {__file__}:{action.__code__.co_firstlineno}" in text
    graph.replay()
    assert z.cpu().tolist() == [20, 20, 20]
    assert event.query()
    event.synchronize()


def test_a_line_of_a_function_called_by_the_program_is_that_function_s() -> None:
    """The line is the innermost of the program's own, not that of the capture's block."""

    def helper() -> None:
        torch.npu.synchronize()

    with torch.npu.graph(torch.npu.NPUGraph()), pytest.raises(RuntimeError) as refused:
        helper()
    assert f"{__file__}:{helper.__code__.co_firstlineno + 1} " in str(refused.value)


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_no_mode_permits_waiting_for_what_is_captured(mode: str) -> None:
    """The device with a captured stream, that stream and its events: refused in every mode."""
    with torch.npu.graph(torch.npu.NPUGraph(), capture_error_mode=mode):
        stream = torch.npu.current_stream()
        event = stream.record_event()
        for waits in (torch.npu.synchronize, stream.synchronize, event.synchronize, torch.npu.empty_cache):
            with pytest.raises(RuntimeError, match="107030"):
                waits()


@pytest.mark.parametrize("order", ["fifo", "lazy", "random:3"])
def test_what_is_not_captured_may_be_waited_for_and_queried(order: str) -> None:
    """CANN forbids blocking copies by mode, and waits only for what is captured: other streams and events stay usable."""
    x, side = torch.zeros(3, device="npu"), torch.npu.Stream()
    torch.npu.synchronize()
    with schedule(order):
        with torch.npu.graph(torch.npu.NPUGraph(), stream=torch.npu.Stream()):
            with torch.npu.stream(side):
                x.add_(1)
                event = side.record_event()
            event.synchronize()
            assert event.query()
            with torch.npu.stream(side):
                x.add_(1)
            side.synchronize()
            assert side.query()
        assert x.cpu().tolist() == [2, 2, 2]


def test_memory_may_be_taken_from_the_device_in_a_capture() -> None:
    """torch_npu's allocator asks the runtime for a pool's memory there; CANN does not list that as unsafe."""
    graph = torch.npu.NPUGraph()
    reserved = torch.npu.memory_reserved()
    with torch.npu.graph(graph):
        large = torch.ones(8 << 20, device="npu")
    assert torch.npu.memory_reserved() >= reserved + large.nbytes
    graph.replay()
    assert large[-1].item() == 1


def test_times_want_events_that_keep_them() -> None:
    """Without `enable_timing` an event keeps no time: 107006 names the option, in `elapsed_time` and `recorded_time`."""
    plain, timed = torch.npu.Event(), torch.npu.Event(enable_timing=True)
    plain.record()
    timed.record()
    torch.npu.synchronize()
    asks = (lambda: plain.elapsed_time(timed), lambda: timed.elapsed_time(plain), plain.recorded_time)
    for ask in asks:
        with pytest.raises(RuntimeError, match=r"(?s)107006.*enable_timing=True"):
            ask()
    assert timed.elapsed_time(timed) == 0
