"""What scopes do when they run: the stream, its core limits, the process's deterministic level.

They are set at `scope_enter` and put back at `scope_exit`, in eager mode as well as while a graph is captured or run
operator by operator. A capture inherits what is in force around the call, which is part of the graph's key.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import fx

from npugraph_ex.aclgraph import _npu_private, side_streams
from npugraph_ex.errors import ScopeError
from npugraph_ex.graph.streams.labels import KEPT, labels_of
from npugraph_ex.graph.streams.ops import ENTERS, implement

Runner = Callable[..., Sequence[Any]]
"""Runs a graph: takes its inputs and returns its outputs."""


class _Opened(NamedTuple):
    """An open scope: what it says together with the scopes around it, and how to put back what was before."""

    labels: Mapping[str, Any]
    restore: tuple[Callable[[], None], ...]


class _Thread(threading.local):
    """The open scopes of one thread, and their part in a graph's key."""

    def __init__(self) -> None:
        self.opened: list[_Opened] = []
        self.key: tuple[object, ...] = ()


here = _Thread()


def enter(keys: Sequence[str], values: Sequence[str], stream: torch.npu.Stream | None = None) -> None:
    """Open a scope on this thread.

    Args:
        keys: as in `scope_enter`.
        values: one for each key.
        stream: whose core limit to set; the current stream's when None.

    Raises:
        ScopeError: a key or value that means nothing, or a limit that the device does not have.
    """
    around = here.opened[-1].labels if here.opened else {}
    new = labels_of(keys, values, around)
    restore: list[Callable[[], None]] = []
    try:
        if "stream_label" in new:
            restore.append(_switch(side_streams.stream(new["stream_label"])))
        if "core_limit" in new:
            restore.append(_limit(stream or torch.npu.current_stream(), *new["core_limit"]))
        if "deterministic_level" in new:
            restore.append(_npu_private.set_deterministic_level(new["deterministic_level"]))
    except BaseException:
        for undo in reversed(restore):
            undo()
        raise
    here.opened.append(_Opened({**around, **new}, tuple(reversed(restore))))
    _note_key()


def deterministic_level() -> int:
    """The deterministic level in force."""
    return _npu_private.deterministic_level()


def vector_cores() -> int:
    """How many vector cores the current device has."""
    return int(torch.npu.get_device_limit(torch.npu.current_device())["vector_core_num"])


def leave() -> None:
    """Close the innermost scope of this thread."""
    if not here.opened:
        raise ScopeError("scope_exit closes a scope, and none is open on this thread")
    try:
        for undo in here.opened.pop().restore:
            undo()
    finally:
        _note_key()


def _nothing_to_do(tag: str, event: str = "") -> None:
    del tag, event


implement(
    {
        "scope_enter": enter,
        "scope_exit": leave,
        "record": side_streams.record,
        "wait": side_streams.wait,
        "record_stream": side_streams.record_stream,
        "keep_alive": side_streams.keep_alive,
        # Eager code runs in the order in which it is written; compiled code has records and waits in their place.
        "tagged_event_record": _nothing_to_do,
        "tagged_event_wait": _nothing_to_do,
    }
)


def _note_key() -> None:
    """Note what a capture inherits; a stream scope in eager mode changes nothing."""
    labels = here.opened[-1].labels if here.opened else {}
    here.key = tuple(f"{name}={labels[name]}" for name in ("core_limit", "deterministic_level") if name in labels)


def _switch(stream: torch.npu.Stream | None) -> Callable[[], None]:
    """Make a stream the current one, and return what makes the earlier one current; None changes nothing."""
    earlier = torch.npu.current_stream()
    if stream is not None:
        torch.npu.set_stream(stream)
    return lambda: torch.npu.set_stream(earlier)


def _limit(stream: torch.npu.Stream, cube: int, vector: int) -> Callable[[], None]:
    """Set a stream's core limits, and return what puts the earlier ones back."""
    earlier = torch.npu.get_stream_limit(stream)
    torch.npu.reset_stream_limit(stream)
    most = torch.npu.get_stream_limit(stream)

    def restore() -> None:
        torch.npu.reset_stream_limit(stream)
        if earlier != most:
            torch.npu.set_stream_limit(stream, earlier["cube_core_num"], earlier["vector_core_num"])

    asked = {"cube_core_num": cube, "vector_core_num": vector}
    for kind, count in asked.items():
        if count > most[kind]:
            restore()
            raise ScopeError(f"a limit of {count} cores ({kind}) was asked for; the device has {most[kind]}")
    wanted = {kind: earlier[kind] if count == KEPT else count for kind, count in asked.items()}
    torch.npu.set_stream_limit(stream, wanted["cube_core_num"], wanted["vector_core_num"])
    return restore


@contextmanager
def inherited(streams: Iterable[torch.npu.Stream]) -> Iterator[None]:
    """Give streams the core limits of the current one, for a run or a capture."""
    limits = torch.npu.get_stream_limit(torch.npu.current_stream())
    with ExitStack() as stack:
        for stream in streams:
            stack.callback(_limit(stream, limits["cube_core_num"], limits["vector_core_num"]))
        yield


def around(gm: fx.GraphModule) -> Callable[[Runner], Runner]:
    """What has to happen around each run of a graph, as a decorator; make one for a graph, it owns the graph's streams.

    Where the graph has scopes, an exception leaves none open; where it has side streams, they are there.
    """
    sides = side_streams.SideStreams(gm.graph)
    has_scopes = any(gm.graph.find_nodes(op="call_function", target=target) for target in ENTERS)

    def decorate(runner: Runner) -> Runner:
        closed = closing(runner) if has_scopes else runner
        return _on_streams(closed, sides) if sides else closed

    return decorate


def _on_streams(function: Runner, sides: side_streams.SideStreams) -> Runner:
    """The function, with the side streams that its scopes name; works under a capture and without one."""

    def run(*args: Any, **kwargs: Any) -> Sequence[Any]:
        with sides.running(), inherited(sides.streams):
            results = function(*args, **kwargs)
        if not torch.npu.is_current_stream_capturing():
            for result in results:
                if isinstance(result, torch.Tensor):  # perhaps allocated on a side stream, and the caller's from now on
                    result.record_stream(torch.npu.current_stream())
        return results

    return run


def closing(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, such that scopes which an exception left open are closed."""

    def run(*args: Any, **kwargs: Any) -> Any:
        depth = len(here.opened)
        try:
            return function(*args, **kwargs)
        finally:
            while len(here.opened) > depth:
                leave()

    return run
