"""What scopes do when they run: core limits of the current stream, the process's deterministic level.

Both are set at `scope_enter` and put back at `scope_exit`, in eager mode as well as while a graph is captured or run
operator by operator. A capture inherits what is in force around the call, which is part of the graph's key.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import fx

from npugraph_ex.aclgraph import _npu_private
from npugraph_ex.errors import ScopeError
from npugraph_ex.streams.labels import KEPT, labels_of
from npugraph_ex.streams.ops import ENTERS, implement


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
    if "stream_label" in new:
        raise ScopeError("stream scopes work inside compiled code only; in eager mode use torch.npu.stream(...)")
    restore: list[Callable[[], None]] = []
    try:
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


def leave() -> None:
    """Close the innermost scope of this thread."""
    if not here.opened:
        raise ScopeError("scope_exit closes a scope, and none is open on this thread")
    try:
        for undo in here.opened.pop().restore:
            undo()
    finally:
        _note_key()


implement(enter, leave)


def _note_key() -> None:
    labels = here.opened[-1].labels if here.opened else {}
    here.key = tuple(f"{name}={value}" for name, value in sorted(labels.items()))


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
def inherited(stream: torch.npu.Stream) -> Iterator[None]:
    """Give a stream the core limits of the current one, for a capture."""
    limits = torch.npu.get_stream_limit(torch.npu.current_stream())
    restore = _limit(stream, limits["cube_core_num"], limits["vector_core_num"])
    try:
        yield
    finally:
        restore()


def forward_of(gm: fx.GraphModule) -> Callable[..., Sequence[Any]]:
    """The graph's forward; where the graph has scopes, such that an exception leaves none open."""
    forward: Callable[..., Sequence[Any]] = gm.forward
    has_scopes = any(gm.graph.find_nodes(op="call_function", target=target) for target in ENTERS)
    return closing(forward) if has_scopes else forward


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
