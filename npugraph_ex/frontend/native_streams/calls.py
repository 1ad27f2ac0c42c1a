"""What a call of a graph with native streams does around it: to the code outside the user's objects mean what they always do.

Inside, the graph runs on streams of its own. So the call comes after the work that the user's streams were given before,
and after the events that it awaits; work that those streams are given later, and waits for events that it records, come
after the call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from npugraph_ex import _torch_private
from npugraph_ex.aclgraph import side_streams
from npugraph_ex.graph.streams.labels import MAIN


@dataclass(frozen=True)
class NativeObjects:
    """The user's stream and event objects of one graph, by the numbers under which Dynamo finds them at each call.

    Attributes:
        streams: number -> label; the label of the main stream is empty.
        given: those of the streams that the graph did not make itself.
        recorded: numbers of the events that the graph records.
        awaited: numbers of the events that the graph awaits before it records them.
    """

    streams: dict[int, str]
    given: tuple[int, ...]
    recorded: tuple[int, ...]
    awaited: tuple[int, ...]


def around(compiled: Callable[..., Any], original: Callable[..., Any], objects: NativeObjects) -> Callable[..., Any]:
    """The compiled graph, ordered with what the code around it does on the streams and events that it uses.

    Args:
        compiled: the graph, which runs on streams of its own beside the current one.
        original: the same as Dynamo traced it, which runs on the user's streams; called where two streams that were two
            when the graph was compiled are one now, or the other way round.
        objects: what the graph uses.
    """
    numbers = tuple(objects.streams)
    pattern = _pattern([MAIN, *objects.streams.values()])
    sides = tuple(number for number in numbers if objects.streams[number] != MAIN)
    as_it_was = as_traced(original)

    def run(*args: Any) -> Any:
        current = torch.npu.current_stream()
        streams = {number: _as_npu(_torch_private.traced_object(number)) for number in numbers}
        if _pattern([identity(current), *map(identity, streams.values())]) != pattern:
            return as_it_was(*args)
        recorded = [_torch_private.traced_object(number) for number in objects.recorded]
        for number in objects.awaited:
            current.wait_event(_torch_private.traced_object(number))
        for number in sides:
            if number in objects.given:
                current.wait_stream(streams[number])
        with side_streams.standing_for({objects.streams[number]: streams[number] for number in sides}):
            result = compiled(*args)
        for event in recorded:
            event.record(current)
        for number in sides:
            streams[number].wait_stream(current)
        return result

    return run


def as_traced(original: Callable[..., Any]) -> Callable[..., Any]:
    """A Dynamo graph as it was traced, on the user's own streams and operator by operator."""

    def run(*args: Any) -> Any:
        _torch_private.set_current_stream(torch.npu.current_stream())
        return original(*args)

    return run


def _as_npu(stream: Any) -> torch.npu.Stream:
    """A stream as torch_npu's class: Dynamo's current stream, and `torch.Stream(...)`, are of torch's own."""
    return torch.npu.Stream(
        stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
    )


def identity(stream: Any) -> tuple[int, int]:
    """What two objects of one stream share, whatever their class."""
    return stream.device_index, stream.stream_id


def _pattern(things: Sequence[Any]) -> tuple[int, ...]:
    """Of each thing, the first place that has an equal one."""
    return tuple(things.index(thing) for thing in things)
