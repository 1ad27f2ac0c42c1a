"""What a capture refuses and permits, and what replays compute."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch

from npugraph_ex_conformance.fidelity.rule import (
    ASSUMED,
    HEADER,
    RUNTIME,
    TORCH,
    TORCH_NPU,
    DeviceRule,
    captured,
    code,
    elsewhere,
    held,
    in_capture,
    ones,
    replayed,
)

_GRAPHS = f"{TORCH}: CUDA graphs, by analogy"
_MODE = f"{HEADER}: 107030, stream is captured, does not support the operation"


@cache
def _pinned() -> torch.Tensor:
    """Pinned memory, which lives as long as the process: a capture may hold it."""
    return torch.ones(4).pin_memory()


_REFUSED: dict[str, tuple[str, Callable[[torch.Tensor], Any]]] = {
    "item": ("item() of a captured value", lambda x: x[0].item()),
    "tolist": ("tolist()", lambda x: x.tolist()),
    "cpu": ("a copy to the host", lambda x: x.cpu()),
    "numpy": ("a copy into a tensor of the host", lambda x: torch.empty(4).copy_(x)),
    "bool": ("the truth of a tensor", lambda x: bool(x.sum() > 0)),
    "int": ("int() of a tensor", lambda x: int(x[0])),
    "nonzero": ("nonzero(), whose size the host must know", lambda x: x.nonzero()),
    "masked-select": ("indexing by a mask", lambda x: x[x > 0]),
    "unique": ("unique()", lambda x: x.unique()),
    "equal": ("torch.equal", lambda x: torch.equal(x, x + 1)),
    "copy-from-host": ("a blocking copy from the host", lambda x: x.copy_(torch.ones(4))),
    "to-device": ("to('npu') of a tensor of the host", lambda _: torch.ones(4).to("npu")),
    "tensor": ("torch.tensor(..., device='npu')", lambda _: torch.tensor([1.0, 2.0], device="npu")),
    "pageable": (
        "a copy that does not block, from memory that is not pinned",
        lambda x: x.copy_(torch.ones(4), non_blocking=True),
    ),
    "cpu-fallback": ("an operator that torch_npu computes on the CPU", torch.special.bessel_j0),
    "device-synchronize": ("torch.npu.synchronize()", lambda _: torch.npu.synchronize()),
    "stream-synchronize": ("a wait for the captured stream", lambda _: torch.npu.current_stream().synchronize()),
    "event-synchronize": (
        "a wait for a captured event",
        lambda _: torch.npu.current_stream().record_event().synchronize(),
    ),
    "empty-cache": ("torch.npu.empty_cache()", lambda _: torch.npu.empty_cache()),
    "item-elsewhere": ("item() on another stream", lambda _: elsewhere(lambda: ones().sum().item())),
    "copy-elsewhere": ("a blocking copy to another stream", lambda _: elsewhere(lambda: torch.ones(3).to("npu"))),
}
_PERMITTED: dict[str, tuple[str, Callable[[torch.Tensor], Any]]] = {
    "operators": ("operators", lambda x: (x * 2).relu_().sum()),
    "views": ("views", lambda x: x.view(2, 2).t()[0]),
    "in-place": ("operators in place", lambda x: x.add_(1)),
    "device-copy": ("copies within the device", lambda x: torch.empty_like(x).copy_(x)),
    "factories": ("factories without values of the host", lambda _: torch.arange(8, device="npu")),
    "fill": ("fill_ and zero_", lambda x: x.fill_(2).zero_()),
    "random": ("random numbers", lambda _: torch.rand(4, device="npu")),
    "allocation": ("memory that the allocator must take from the device", lambda _: ones(8 << 20)),
    "free": ("the end of a captured tensor", lambda x: (x + 1, gc.collect(0))[0] is None),
    "products": ("matrix products", lambda x: x.view(2, 2) @ x.view(2, 2)),
    "where": ("where with three operands", lambda x: torch.where(x > 0, x, -x)),
    "casts": ("casts", lambda x: x.half().float()),
    "events": ("an event of the captured stream, recorded and waited for", lambda _: _waits()),
    "new-stream": ("a new stream", lambda _: torch.npu.Stream()),
    "is-capturing": ("is_current_stream_capturing()", lambda _: torch.npu.is_current_stream_capturing()),
    "mem-info": ("mem_get_info()", lambda _: torch.npu.mem_get_info()),
    "pinned": ("a copy that does not block, from pinned memory", lambda x: x.copy_(_pinned(), non_blocking=True)),
    "other-synchronize": ("a wait for a stream that is not captured", lambda _: torch.npu.Stream().synchronize()),
    "other-query": ("the query of a stream that is not captured", lambda _: torch.npu.Stream().query()),
}  # fmt: skip


def _waits() -> None:
    stream = torch.npu.current_stream()
    stream.wait_event(stream.record_event())


_MODES = ("global", "thread_local", "relaxed")
_READS: dict[str, Callable[[], Any]] = {"read": lambda: ones().sum().item(), "copy": lambda: torch.ones(3).to("npu")}


def _fork(joins: bool) -> None:
    side, x = torch.npu.Stream(), ones()
    with torch.npu.stream(torch.npu.current_stream()), torch.npu.graph(torch.npu.NPUGraph()):
        side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            x.add_(1)
        if joins:
            torch.npu.current_stream().wait_stream(side)


def _across(end: bool) -> str:
    """A wait in one capture for an event of another; or, afterwards, the end of the capture that has the event."""
    first, second, one, two = torch.npu.NPUGraph(), torch.npu.NPUGraph(), torch.npu.Stream(), torch.npu.Stream()
    with torch.npu.stream(one):
        first.capture_begin()
        kept, event = ones() + 1, torch.npu.Event()
        event.record(one)
        with torch.npu.stream(two):
            second.capture_begin()
            waited = held(lambda: event.wait(two))
            held(second.capture_end)
        ended = held(first.capture_end)
    del kept
    return ended if end else waited


def _outside() -> str:
    """A wait, after a capture, for an event that was last recorded in it."""
    event = torch.npu.Event()
    graph, _ = captured(lambda: (ones(), event.record())[0])
    found = held(lambda: torch.npu.Stream().wait_event(event))
    del graph
    return found


def _replay_in_capture() -> str:
    graph, _ = captured(ones)
    return in_capture(lambda _: graph.replay())


def _nothing_is_computed() -> list[float]:
    x = ones()
    captured(lambda: x.add_(1))
    return x.tolist()


def _pinned_replays() -> list[float]:
    buffer = torch.ones(4).pin_memory()
    graph, y = captured(lambda: buffer.to("npu", non_blocking=True) * 10)
    found = []
    for value in (1.0, 3.0):
        buffer.fill_(value)
        graph.replay()
        found.append(y[0].item())
    return found


def _forked(x: torch.Tensor) -> torch.Tensor:
    side = torch.npu.Stream()
    side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        b = x * 10
    torch.npu.current_stream().wait_stream(side)
    return x + b


def _two_graphs(order: str) -> float:
    pool, x = torch.npu.graph_pool_handle(), ones()
    first, a = captured(lambda: x + 1, pool=pool)
    second, b = captured(lambda: a * 3, pool=pool)
    x.fill_(4)
    for which in order:
        (first if which == "1" else second).replay()
    return float(b[0].item())


def _dead_graph() -> float:
    x = ones()
    graph, _ = captured(lambda: x.add_(1))
    graph.replay()
    del graph
    gc.collect()
    return float(x[0].item())


def _twice(same: bool) -> float:
    x = ones()
    graph, _ = captured(lambda: x.mul_(2))
    graph.replay()
    with torch.npu.stream(torch.npu.current_stream() if same else torch.npu.Stream()) as _:
        torch.npu.synchronize()
        graph.replay()
    torch.npu.synchronize()
    return float(x[0].item())


def _bad_index() -> list[str]:
    index, data = torch.zeros(1, dtype=torch.int64, device="npu"), ones()
    graph, _ = captured(lambda: data.gather(0, index))
    index.fill_(99)
    return [held(graph.replay), code(lambda: None)]


def rules() -> Iterator[DeviceRule]:
    """The rules."""
    for name, (what, action) in _REFUSED.items():
        yield DeviceRule(
            f"capture.refuses-{name}", f"In a capture of mode global {what} is an error.", _MODE,
            partial(in_capture, action), "107030",
        )  # fmt: skip
    for name, (what, action) in _PERMITTED.items():
        probe = partial(in_capture, action)
        yield DeviceRule(f"capture.permits-{name}", f"A capture takes {what}.", _GRAPHS, probe, "done")
    for mode in _MODES:
        for name, read in _READS.items():
            for thread in (False, True):
                forbidden = mode == "global" or (mode == "thread_local" and not thread)
                verdict = "an error" if forbidden else "permitted"
                who = "another thread" if thread else "the capturing thread"
                yield DeviceRule(
                    f"mode.{mode}-{name}-{'other' if thread else 'own'}-thread",
                    f"During a capture of mode {mode} a {name} on another stream by {who} is {verdict}.",
                    f"{RUNTIME}: aclmdlRICaptureMode",
                    partial(in_capture, _elsewhere(read), mode, other_thread=thread),
                    "107030" if forbidden else "done",
                )  # fmt: skip
        for name in ("device-synchronize", "stream-synchronize", "event-synchronize", "empty-cache", "item"):
            if mode != "global":
                what, action = _REFUSED[name]
                yield DeviceRule(
                    f"mode.{mode}-{name}", f"Mode {mode} does not permit {what}.", ASSUMED,
                    partial(in_capture, action, mode), "107030",
                )  # fmt: skip
    x = "the captured stream"
    yield DeviceRule(
        "capture.query-stream", f"The query of {x} is an error.", f"{HEADER}: 107027, stream is captured",
        lambda: in_capture(lambda _: torch.npu.current_stream().query()), "107027",
    )  # fmt: skip
    yield DeviceRule(
        "capture.query-event", "The query of a captured event is an error.", f"{HEADER}: 107028, event is captured",
        lambda: in_capture(lambda _: torch.npu.current_stream().record_event().query()), "107028",
    )  # fmt: skip
    yield DeviceRule("capture.replay", f"A replay on {x} is an error.", ASSUMED, _replay_in_capture, "107030")
    yield DeviceRule(
        "capture.unjoined", "The end of a capture whose side stream has not been joined is an error.",
        f"{HEADER}: 107025, STREAM_UNJOINED", lambda: code(lambda: _fork(False)), "107025",
    )  # fmt: skip
    yield DeviceRule(
        "capture.joined", "A side stream that waits for the capture and is waited for is a part of it.", _GRAPHS,
        lambda: code(lambda: _fork(True)), "done",
    )  # fmt: skip
    yield DeviceRule(
        "capture.default-stream", "The default stream cannot be captured.",
        f"{HEADER}: 107031, implicit dependency from the default stream",
        lambda: held(torch.npu.NPUGraph().capture_begin) != "done", True,
    )  # fmt: skip
    yield DeviceRule(
        "capture.conflict", "A wait in one capture for an event of another is an error.", f"{HEADER}: 107032",
        lambda: _across(False), "107032",
    )  # fmt: skip
    yield DeviceRule(
        "capture.conflict-spoils", "That wait spoils the capture that has the event.", ASSUMED, lambda: _across(True),
        "107026",
    )  # fmt: skip
    yield DeviceRule(
        "capture.event-outside", "A wait, outside, for an event that was last recorded in a capture is an error.",
        f"{HEADER}: 107028, event is captured", _outside, "107028",
    )  # fmt: skip
    yield DeviceRule(
        "capture.end-without", "An end on a stream that is not captured is an error.",
        f"{HEADER}: 107029, stream is not in capture status", lambda: held(torch.npu.NPUGraph().capture_end) != "done",
        True,
    )  # fmt: skip
    yield DeviceRule(
        "capture.flag", "is_current_stream_capturing() is true in a capture, and false after it.",
        TORCH_NPU + ": npu/graphs.py",
        lambda: [captured(torch.npu.is_current_stream_capturing)[1], torch.npu.is_current_stream_capturing()],
        [True, False],
    )  # fmt: skip
    yield DeviceRule(
        "replay.computes-nothing-before", "A capture computes nothing.", _GRAPHS, _nothing_is_computed, [1.0] * 4,
    )  # fmt: skip
    yield DeviceRule(
        "replay.reads-inputs-anew", "A replay computes on what its inputs hold by then.", _GRAPHS,
        lambda: replayed(lambda x: x * 2 + 1), [5.0, 11.0],
    )  # fmt: skip
    yield DeviceRule(
        "replay.forks", "A fork that joins keeps its order in each replay.", _GRAPHS, lambda: replayed(_forked),
        [22.0, 55.0],
    )  # fmt: skip
    yield DeviceRule(
        "replay.in-place", "What a capture writes in place is written at each replay.", _GRAPHS,
        lambda: replayed(lambda x: x.add_(1)), [3.0, 6.0],
    )  # fmt: skip
    yield DeviceRule(
        "replay.views", "A view in a capture shares memory in each replay.", _GRAPHS,
        lambda: replayed(lambda x: (x.view(2, 2).add_(1), x * 2)[1]), [6.0, 12.0],
    )  # fmt: skip
    yield DeviceRule(
        "replay.scalars-are-burnt-in", "A number of the host is what it was at the capture.", _GRAPHS,
        lambda: replayed(lambda x: x * 3), [6.0, 15.0],
    )  # fmt: skip
    yield DeviceRule(
        "replay.pinned", "A captured copy from pinned memory reads the memory at each replay.", ASSUMED, _pinned_replays,
        [10.0, 30.0],
    )  # fmt: skip
    yield DeviceRule(
        "replay.shared-pool", "Two graphs of one pool, replayed in the order of their captures, compute what they mean.",
        _GRAPHS, lambda: _two_graphs("12"), 15.0,
    )  # fmt: skip
    yield DeviceRule(
        "replay.shared-pool-twice", "So they do a second time.", _GRAPHS, lambda: _two_graphs("1212"), 15.0,
    )  # fmt: skip
    yield DeviceRule(
        "replay.outlives-its-graph", "A replay that was launched is not taken back when its graph is deleted.", ASSUMED,
        _dead_graph, 2.0,
    )  # fmt: skip
    yield DeviceRule(
        "replay.twice", "A graph may be replayed again before its last replay has ended.", ASSUMED,
        lambda: _twice(same=True), 4.0,
    )  # fmt: skip
    yield DeviceRule(
        "replay.another-stream", "A graph may be replayed on another stream than before.", _GRAPHS,
        lambda: _twice(same=False), 4.0,
    )  # fmt: skip
    yield DeviceRule(
        "replay.kernel-error", "A kernel's error in a replay surfaces at the next synchronisation.",
        f"{HEADER}: 507015, aicore exception", _bad_index, ["done", "507015"],
    )  # fmt: skip


def _elsewhere(read: Callable[[], Any]) -> Callable[[torch.Tensor], Any]:
    return lambda _: elsewhere(read)
