"""`with scope.limit_core_num(...)`, `scope.deterministic(...)`, `scope.npu_stream_switch(...)`, eager and compiled.

Scopes nest: an inner one keeps what the outer one says and it does not. Inside compiled code a scope is a pair of
operators that enclose what was traced between them, see `npugraph_ex.graph.streams`. Importing this module imports no torch.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, NoReturn

from npugraph_ex.errors import ScopeError

if TYPE_CHECKING:
    from types import TracebackType

    import torch

__all__ = ["deterministic", "limit_core_num", "npu_stream_switch"]


def refuse(text: str) -> NoReturn:
    """Raise a ScopeError. Dynamo cannot trace that: it says the text itself with ``fullgraph=True``, and otherwise calls this.

    The text may not have the ``repr`` of a stream or an event, which Dynamo cannot trace either: see ``named``.
    """
    from torch.compiler import is_dynamo_compiling

    if is_dynamo_compiling():
        from npugraph_ex._torch_private import graph_break

        graph_break(msg=text)
    raise ScopeError(text)


def named(value: object) -> str:
    """A wrong argument, for a message: what was written where that is short, else its type."""
    return (
        repr(value)
        if value is None or isinstance(value, (str, int, float))
        else f"a value of type {type(value).__name__}"
    )


class _Scope:
    """One `with` block. Written plainly, because Dynamo traces through it."""

    def __init__(self, keys: list[str], values: list[str], stream: torch.npu.Stream | None = None) -> None:
        self._keys = keys
        self._values = values
        self._stream = stream

    def __enter__(self) -> None:
        import torch

        import npugraph_ex.aclgraph.scopes  # noqa: F401 - what the operators do

        if self._stream is None:
            torch.ops.npugraph_ex.scope_enter(self._keys, self._values)
            return
        with torch.npu.stream(self._stream):  # a limit is that of the stream which is current where the scope begins
            torch.ops.npugraph_ex.scope_enter(self._keys, self._values)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        import torch

        torch.ops.npugraph_ex.scope_exit()


def limit_core_num(op_aicore_num: int, op_vectorcore_num: int, stream: torch.Stream | None = None) -> _Scope:
    """Let the operators that the block gives to one stream use at most so many cores each, in eager mode and compiled.

    A stream of `npu_stream_switch` has the limit of the stream on which the code around it runs.

    Args:
        op_aicore_num: cube cores, at least 1; -1 keeps what is in force on that stream.
        op_vectorcore_num: vector cores, likewise.
        stream: whose limit to set; when None, that of the stream which is current where the block begins.

    Raises:
        ScopeError: a number that is no core count, more cores than the device has, or a stream that is none.
    """
    counts = []
    for name, given in (("op_aicore_num", op_aicore_num), ("op_vectorcore_num", op_vectorcore_num)):
        if isinstance(given, bool) or not isinstance(given, int) or (given < 1 and given != -1):
            refuse(f"limit_core_num: {name} takes an int >= 1, or -1 for what is in force; got {named(given)}")
        counts.append(str(operator.index(given)))  # a size that Dynamo made symbolic becomes a number, with a guard
    if isinstance(stream, (str, int, float)):
        refuse(f"limit_core_num: stream takes a torch.npu.Stream, or None for the current one; got {named(stream)}")
    return _Scope(["_op_aicore_num", "_op_vectorcore_num"], counts, stream)


def deterministic(level: int) -> _Scope:
    """Run the operators in the block at a deterministic level, as `torch.npu.set_deterministic_level` takes it.

    Compiled code is compiled anew when the level changes.

    Args:
        level: 0 (off), 1, 2 or 3; the higher ones need a CANN that knows them.

    Raises:
        ScopeError: no such level.
    """
    if isinstance(level, bool) or not isinstance(level, int) or level < 0 or level > 3:
        refuse(f"deterministic: level takes 0, 1, 2 or 3; got {named(level)}")
    return _Scope(["_deterministic_level"], [str(operator.index(level))])


def npu_stream_switch(stream_tag: str, stream_priority: int = 0) -> _Scope:
    """Run the operators in the block on a stream of their own, inside compiled code.

    One tag is one stream of the compiled graph. Its work is ordered with other streams' by events alone
    (`npugraph_ex.ops`), but for its first, which follows what stands before it, and for the graph's results, which
    wait for all streams. In eager mode the block runs where the code around it runs, in the order in which it is written.

    Args:
        stream_tag: the stream's name.
        stream_priority: of the stream, as `torch.npu.Stream(priority=...)` takes it: lower numbers go first.

    Raises:
        ScopeError: no such tag or priority.
    """
    if not isinstance(stream_tag, str) or not stream_tag:
        refuse(f"npu_stream_switch: stream_tag takes a str that is not empty; got {named(stream_tag)}")
    if isinstance(stream_priority, bool) or not isinstance(stream_priority, int):
        refuse(f"npu_stream_switch: stream_priority takes an int; got {named(stream_priority)}")
    return _Scope(["_user_stream_label", "_user_stream_priority"], [stream_tag, str(operator.index(stream_priority))])
