"""The effect of scopes at run time: the stream, its core limits, the process's deterministic level.

`scope_enter` sets them and `scope_exit` restores them, in eager mode, under a capture and in a run operator by operator. A
limit applies to the stream that is current at `scope_enter`. A capture inherits the limits and the level that are in force
around the call, for the current stream and for the user's streams in the graph. They are part of the graph key.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import fx

from npugraph_ex.aclgraph import _npu_private, side_streams
from npugraph_ex.errors import ScopeError
from npugraph_ex.graph.streams.labels import KEPT, MAIN, labels_of
from npugraph_ex.graph.streams.ops import ENTERS, implement

GraphFunction = Callable[..., Sequence[Any]]
"""Runs a graph: takes its inputs and returns its outputs."""


class _Opened(NamedTuple):
    """An open scope: how to restore the earlier state, and the settings of all open scopes together.

    Attributes:
        restore: functions to call in this order.
        limits: stream -> cube and vector cores.
        level: the deterministic level; None if no scope sets one.
    """

    restore: tuple[Callable[[], None], ...] = ()
    limits: Mapping[torch.npu.Stream, tuple[int, int]] = {}
    level: int | None = None


class _OpenScopes(threading.local):
    """The open scopes of one thread."""

    def __init__(self) -> None:
        self.opened: list[_Opened] = []


here = _OpenScopes()


def enter(keys: Sequence[str], values: Sequence[str]) -> None:
    """Open a scope on this thread.

    Args:
        keys: as in `scope_enter`.
        values: one for each key.

    Raises:
        ScopeError: an unknown key or value, or a limit beyond the device's cores.
    """
    around = here.opened[-1] if here.opened else _Opened()
    new = labels_of(keys, values, {})  # a limit is kept on the stream
    restore: list[Callable[[], None]] = []
    limits = around.limits
    try:
        if "stream_label" in new:
            restore.append(_switch(side_streams.stream(new["stream_label"])))
        if "core_limit" in new:
            stream = torch.npu.current_stream()
            restore.append(_limit(stream, *new["core_limit"]))
            limits = {**limits, stream: _limit_of(stream)}
        if "deterministic_level" in new:
            restore.append(_npu_private.set_deterministic_level(new["deterministic_level"]))
    except BaseException:
        for undo in reversed(restore):
            undo()
        raise
    here.opened.append(_Opened(tuple(reversed(restore)), limits, new.get("deterministic_level", around.level)))


def key() -> tuple[object, ...]:
    """The limits of the streams and the level that a run or a capture inherits from the scopes around it."""
    if not here.opened:
        return ()
    _, limits, level = here.opened[-1]
    used = {MAIN: torch.npu.current_stream(), **side_streams.native()}
    found = tuple(f"core_limit {label}={limits[stream]}" for label, stream in used.items() if stream in limits)
    return found if level is None else (*found, f"deterministic_level={level}")


def deterministic_level() -> int:
    """The deterministic level in force."""
    return _npu_private.deterministic_level()


def check_limit(cube: int, vector: int) -> None:
    """Raise ScopeError for a limit of more cores than the current device has."""
    most = torch.npu.get_device_limit(torch.npu.current_device())
    for kind, count in (("cube_core_num", cube), ("vector_core_num", vector)):
        if count > most[kind]:
            raise ScopeError(f"a limit of {count} cores ({kind}) is more than the device has: {most[kind]}")


def vector_cores() -> int:
    """How many vector cores the current device has."""
    return int(torch.npu.get_device_limit(torch.npu.current_device())["vector_core_num"])


def leave() -> None:
    """Close the innermost scope of this thread."""
    if not here.opened:
        raise ScopeError("scope_exit closes a scope, and none is open on this thread")
    for undo in here.opened.pop().restore:
        undo()


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
        # Eager code runs in program order; compiled code has records and waits instead.
        "tagged_event_record": _nothing_to_do,
        "tagged_event_wait": _nothing_to_do,
    }
)


def _switch(stream: torch.npu.Stream | None) -> Callable[[], None]:
    """Make a stream the current one, and return a function that restores the earlier one. None changes nothing."""
    earlier = torch.npu.current_stream()
    if stream is not None:
        torch.npu.set_stream(stream)
    return lambda: torch.npu.set_stream(earlier)


def _limit(stream: torch.npu.Stream, cube: int, vector: int) -> Callable[[], None]:
    """Set a stream's core limits, and return a function that restores the earlier ones."""
    check_limit(cube, vector)
    earlier = torch.npu.get_stream_limit(stream)
    torch.npu.reset_stream_limit(stream)
    most = torch.npu.get_stream_limit(stream)

    def restore() -> None:
        torch.npu.reset_stream_limit(stream)
        if earlier != most:
            torch.npu.set_stream_limit(stream, earlier["cube_core_num"], earlier["vector_core_num"])

    asked = {"cube_core_num": cube, "vector_core_num": vector}
    wanted = {kind: earlier[kind] if count == KEPT else count for kind, count in asked.items()}
    torch.npu.set_stream_limit(stream, wanted["cube_core_num"], wanted["vector_core_num"])
    return restore


def _limit_of(stream: torch.npu.Stream) -> tuple[int, int]:
    limits = torch.npu.get_stream_limit(stream)
    return limits["cube_core_num"], limits["vector_core_num"]


@contextmanager
def inherited(streams: Mapping[str, torch.npu.Stream]) -> Iterator[None]:
    """Give a graph's streams, by label, the core limits of the user's streams that they replace, for a run or a capture.

    The other streams get the limits of the current stream.
    """
    current, native = torch.npu.current_stream(), side_streams.native()
    with ExitStack() as stack:
        for stream, limit in [(stream, _limit_of(native.get(label, current))) for label, stream in streams.items()]:
            stack.callback(_limit(stream, *limit))
        yield


def around(gm: fx.GraphModule) -> Callable[[GraphFunction], GraphFunction]:
    """A decorator that prepares streams and scopes for each run of one graph.

    It owns the graph's streams. An exception leaves no scope of the graph open.
    """
    sides = side_streams.SideStreams(gm.graph)
    has_scopes = any(gm.graph.find_nodes(op="call_function", target=target) for target in ENTERS)

    def decorate(function: GraphFunction) -> GraphFunction:
        closed = closing(function) if has_scopes else function
        return _on_streams(closed, sides) if sides else closed

    return decorate


def _on_streams(function: GraphFunction, sides: side_streams.SideStreams) -> GraphFunction:
    """The function with the side streams that its scopes name, with or without a capture."""

    def run(*args: Any, **kwargs: Any) -> Sequence[Any]:
        with sides.running(), inherited(sides.streams):
            results = function(*args, **kwargs)
        if not torch.npu.is_current_stream_capturing():
            for result in results:
                # It may be allocated on a side stream, and belongs to the caller from now on.
                if isinstance(result, torch.Tensor) and result.device.type == "npu":
                    result.record_stream(torch.npu.current_stream())
        return results

    return run


def closing(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function; it closes scopes that an exception leaves open."""

    def run(*args: Any, **kwargs: Any) -> Any:
        depth = len(here.opened)
        try:
            return function(*args, **kwargs)
        finally:
            while len(here.opened) > depth:
                leave()

    return run
