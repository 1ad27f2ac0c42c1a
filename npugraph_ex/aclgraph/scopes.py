"""What scopes do when they run: the stream, its core limits, the process's deterministic level.

They are set at `scope_enter` and put back at `scope_exit`, in eager mode as well as while a graph is captured or run
operator by operator. A limit is that of the stream which is current at `scope_enter`. A capture inherits what is in force
around the call, for the current stream and for the user's streams in the graph; that is part of the graph's key.
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
    """An open scope: how to put back what was before, and what all open scopes together say.

    Attributes:
        restore: to call in this order.
        limits: stream -> cube and vector cores.
        level: the deterministic level, None where no scope names one.
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
        ScopeError: a key or value that means nothing, or a limit that the device does not have.
    """
    around = here.opened[-1] if here.opened else _Opened()
    new = labels_of(keys, values, {})  # what it keeps of a limit is on the stream
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
    """What a run or a capture inherits from the scopes around it: limits of the streams that it uses, and the level."""
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
        # Eager code runs in the order in which it is written; compiled code has records and waits in their place.
        "tagged_event_record": _nothing_to_do,
        "tagged_event_wait": _nothing_to_do,
    }
)


def _switch(stream: torch.npu.Stream | None) -> Callable[[], None]:
    """Make a stream the current one, and return what makes the earlier one current; None changes nothing."""
    earlier = torch.npu.current_stream()
    if stream is not None:
        torch.npu.set_stream(stream)
    return lambda: torch.npu.set_stream(earlier)


def _limit(stream: torch.npu.Stream, cube: int, vector: int) -> Callable[[], None]:
    """Set a stream's core limits, and return what puts the earlier ones back."""
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
    """Give a graph's streams, by label, the core limits of the user's streams for which they stand, for a run or a capture.

    Those that stand for none have the current stream's.
    """
    current, native = torch.npu.current_stream(), side_streams.native()
    with ExitStack() as stack:
        for stream, limit in [(stream, _limit_of(native.get(label, current))) for label, stream in streams.items()]:
            stack.callback(_limit(stream, *limit))
        yield


def around(gm: fx.GraphModule) -> Callable[[GraphFunction], GraphFunction]:
    """A decorator that prepares streams and scopes for each run of a graph. Make one for a graph: it owns the graph's streams.

    Where the graph has scopes, an exception leaves none open; where it has side streams, they are there.
    """
    sides = side_streams.SideStreams(gm.graph)
    has_scopes = any(gm.graph.find_nodes(op="call_function", target=target) for target in ENTERS)

    def decorate(function: GraphFunction) -> GraphFunction:
        closed = closing(function) if has_scopes else function
        return _on_streams(closed, sides) if sides else closed

    return decorate


def _on_streams(function: GraphFunction, sides: side_streams.SideStreams) -> GraphFunction:
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
