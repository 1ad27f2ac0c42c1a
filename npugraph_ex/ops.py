"""Tagged events: order between the streams of `scope.npu_stream_switch`, inside compiled code.

In eager mode such code runs in the order in which it is written, and these functions have nothing to do. Importing this
module imports no torch.
"""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING

from npugraph_ex.scope import named, refuse

if TYPE_CHECKING:
    import torch

__all__ = [
    "TaggedEvent",
    "npu_create_tagged_event",
    "npu_record_tagged_stream",
    "npu_tagged_event_record",
    "npu_tagged_event_wait",
]

_alive: weakref.WeakValueDictionary[str, TaggedEvent] = weakref.WeakValueDictionary()
"""The events that somebody holds, by name, so that a new one gets another."""


class TaggedEvent:
    """An event that compiled code can name.

    Attributes:
        tag: what the user calls it.
        name: the tag, with a number where another event has it already: two models may have events of one tag. The same
            program gives the same names in every process, which compile caches rely on.
    """

    def __init__(self, tag: str) -> None:
        self.tag = tag
        names = itertools.chain((tag,), (f"{tag} ({number})" for number in itertools.count(2)))
        self.name = next(name for name in names if name not in _alive)
        _alive[self.name] = self

    def __repr__(self) -> str:
        return f"TaggedEvent({self.tag!r})"


def npu_create_tagged_event(tag: str) -> TaggedEvent:
    """Make an event, outside of compiled code.

    Args:
        tag: its name in messages; no two events that are used in one graph may share it.

    Raises:
        ScopeError: no such tag.
    """
    if not isinstance(tag, str) or not tag:
        refuse(f"npu_create_tagged_event: tag takes a str that is not empty; got {named(tag)}")
    from torch.compiler import is_dynamo_compiling

    if is_dynamo_compiling():  # another thread may be compiling
        from npugraph_ex._torch_private import graph_break

        graph_break(msg=f"npu_create_tagged_event: make the event {tag!r} outside of the compiled function")
    import npugraph_ex.aclgraph.scopes  # noqa: F401 - defines the operators, which Dynamo may trace before anything else

    return TaggedEvent(tag)


def npu_tagged_event_record(event: TaggedEvent) -> None:
    """Record the event on the stream of the block in which this stands, after all work of that stream before it."""
    import torch

    _check(event, "npu_tagged_event_record")
    torch.ops.npugraph_ex.tagged_event_record(event.tag, event.name)


def npu_tagged_event_wait(event: TaggedEvent) -> None:
    """Make the stream of the block in which this stands wait for the latest record of the event before this line."""
    import torch

    _check(event, "npu_tagged_event_wait")
    torch.ops.npugraph_ex.tagged_event_wait(event.tag, event.name)


def npu_record_tagged_stream(input: torch.Tensor, tagged_stream: str) -> None:  # noqa: A002 - the documented name
    """Say that a stream uses a tensor: its memory is not used for anything else before that stream is through.

    The compiler sees by itself which streams of the graph use a tensor; this is for uses that it cannot see.

    Args:
        input: the tensor.
        tagged_stream: the tag of the stream.
    """
    import torch

    if not isinstance(tagged_stream, str) or not tagged_stream:
        refuse(
            f"npu_record_tagged_stream: tagged_stream takes the tag of a stream, a str; got {named(tagged_stream)}. Give the "
            "stream_tag of its npu_stream_switch"
        )
    torch.ops.npugraph_ex.record_stream(input, tagged_stream)


def _check(event: object, function: str) -> None:
    if not isinstance(event, TaggedEvent):
        tag = event if isinstance(event, str) and event else "tag"
        refuse(
            f"{function} takes an event from npu_create_tagged_event; got {named(event)}. Write "
            f"`event = npu_create_tagged_event({tag!r})` outside of the compiled function, and give {function} that event"
        )
