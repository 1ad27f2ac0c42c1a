"""The side streams of one compiled graph, and its records and waits while it runs or is captured.

A tag is a name within one graph, so each `SideStreams` has its own streams. Code outside a graph, such as eager code, stays
on the current stream, where order needs no events.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import fx

from npugraph_ex.errors import ScopeError
from npugraph_ex.graph.streams.labels import MAIN, labels_of
from npugraph_ex.graph.streams.ops import ENTERS, argument

_POOLED = 64
"""More draws than torch_npu has streams of one priority. After so many draws two tags have to share a stream."""


class _RunState:
    """One run or capture of a graph: its recorded events and the memory that it keeps."""

    def __init__(self, streams: Mapping[str, torch.npu.Stream]) -> None:
        self.streams = streams
        self.events: list[torch.npu.Event] = []
        self.kept: list[torch.Tensor] = []


class _ThreadState(threading.local):
    """The current run of this thread, if any, and the user's streams that a graph's labels replace."""

    def __init__(self) -> None:
        self.run: _RunState | None = None
        self.native: Mapping[str, torch.npu.Stream] = {}


here = _ThreadState()


class SideStreams:
    """The streams of one graph on one device, made at the first run.

    Args:
        graph: the graph after all passes, where scope nodes name the streams.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._priorities: dict[str, int] = {}
        for node in graph.nodes:
            if node.target in ENTERS:
                said = labels_of(argument(node, 0, "keys"), argument(node, 1, "values"), {})
                if "stream_label" in said:
                    self._priorities[said["stream_label"]] = said.get("stream_priority", 0)
        self._streams: dict[str, torch.npu.Stream] = {}
        self._device = -1

    def __bool__(self) -> bool:
        return bool(self._priorities)

    @property
    def streams(self) -> Mapping[str, torch.npu.Stream]:
        """The streams made so far, by label."""
        return self._streams

    @contextmanager
    def running(self) -> Iterator[None]:
        """Make stream scopes, records and waits of this thread apply to this graph. The current stream is its main stream.

        Events and kept memory are released at the end. The streams return to torch_npu's pool when this object is freed.
        """
        main = torch.npu.current_stream()
        earlier, here.run = here.run, _RunState({**self._made(main), MAIN: main})
        try:
            yield
        finally:
            here.run = earlier

    def _made(self, main: torch.npu.Stream) -> Mapping[str, torch.npu.Stream]:
        """The streams, on the device of the main one and distinct from it, from each other and from the user's."""
        if self._device != main.device_index or not {main, *native().values()}.isdisjoint(self._streams.values()):
            self._streams, self._device = {}, main.device_index
        for label, priority in self._priorities.items():
            if label not in self._streams:
                self._streams[label] = draw(priority, {main, *self._streams.values()})
        return self._streams


def draw(priority: int, taken: set[torch.npu.Stream]) -> torch.npu.Stream:
    """A stream that is neither taken nor one of the user's streams in the graph, if torch_npu's pool has such a stream.

    The pool returns its streams in turn, so a user's stream comes again. Core limits belong to a stream and must not mix.
    """
    taken = {*taken, *native().values()}
    for _ in range(_POOLED):
        stream = torch.npu.Stream(priority=priority)
        if stream not in taken:
            break
    return stream


@contextmanager
def standing_for(native: Mapping[str, torch.npu.Stream]) -> Iterator[None]:
    """Set, for one call, the user's streams that the labels of a graph replace."""
    earlier, here.native = here.native, native
    try:
        yield
    finally:
        here.native = earlier


def native() -> Mapping[str, torch.npu.Stream]:
    """The user's streams in the graph that is called, by label."""
    return here.native


def stream(label: str) -> torch.npu.Stream | None:
    """The stream of a label in the graph that is running; None where none is running."""
    if here.run is None:
        return None
    if label not in here.run.streams:
        known = ", ".join(repr(name) for name in here.run.streams if name != MAIN)
        raise ScopeError(
            f"the graph that is running has no stream {label!r}; it has {known or 'none beside the main one'}"
        )
    return here.run.streams[label]


def record() -> torch.Tensor:
    """Record an event on the current stream; return its token: a number, empty outside of a graph."""
    run = here.run
    if run is None:
        return torch.empty(0, dtype=torch.int64)
    event = torch.npu.Event()
    event.record()
    run.events.append(event)
    return torch.tensor([len(run.events) - 1])


def wait(tensors: Sequence[torch.Tensor]) -> None:
    """Make the current stream wait for the events of the tokens."""
    run = here.run
    if run is not None:
        for token in tensors:
            run.events[int(token)].wait()


def record_stream(tensor: torch.Tensor, label: str) -> None:
    """Keep a tensor's memory from other use until the label's stream has finished its work so far."""
    run = here.run
    # A stream whose work was all dead code uses nothing, and none uses memory of the host.
    if run is None or label not in run.streams or tensor.device.type == "cpu":
        return
    if torch.npu.is_current_stream_capturing():
        run.kept.append(tensor)  # the allocator's own method queries events, which a capture forbids
    else:
        tensor.record_stream(run.streams[label])


def keep_alive(tensors: Sequence[torch.Tensor]) -> None:
    """Do nothing. The call only keeps the tensors referenced until here."""
    del tensors
