"""Synchronises a compiled graph with the caller's streams and events, so that code around the call sees eager ordering.

The graph runs on its own streams. A call waits for the earlier work of the user's streams, and for the events that the graph
awaits. Later work of those streams waits for the call, and so do waits for events that the graph records.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from npugraph_ex import _torch_private
from npugraph_ex.aclgraph import side_streams
from npugraph_ex.graph.streams.labels import MAIN
from npugraph_ex.versions.traced_objects import current_stream_numbers, replace_traced_object


@dataclass(frozen=True)
class NativeObjects:
    """The user's stream and event objects of one graph, by Dynamo's numbers for them.

    Attributes:
        streams: number -> label; the label of the main stream is empty.
        given: the streams that the graph does not make itself.
        recorded: numbers of the events that the graph records.
        awaited: numbers of the events that the graph awaits before it records them.
    """

    streams: dict[int, str]
    given: tuple[int, ...]
    recorded: tuple[int, ...]
    awaited: tuple[int, ...]


def around(compiled: Callable[..., Any], original: Callable[..., Any], objects: NativeObjects) -> Callable[..., Any]:
    """The compiled graph, ordered with the caller's work on its streams and events.

    Args:
        compiled: the graph, which runs on its own streams beside the current one.
        original: the graph from Dynamo, which runs on the user's streams. It runs if two
            streams that differed at compilation are one now, or the other way round.
        objects: the streams and events of the graph.
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
            if torch.npu.is_current_stream_capturing():
                # A capture of the caller's may not end while another stream is part of it.
                current.wait_stream(streams[number])
        return result

    return run


def as_traced(original: Callable[..., Any]) -> Callable[..., Any]:
    """The Dynamo graph that is being compiled, in its original form, on the user's streams and operator by operator."""
    numbers = current_stream_numbers()

    def run(*args: Any) -> Any:
        current = torch.npu.current_stream()
        for number in numbers:
            replace_traced_object(number, current)
        return original(*args)

    return run


def _as_npu(stream: Any) -> torch.npu.Stream:
    """A stream as an object of torch_npu's class; Dynamo's current stream and `torch.Stream(...)` have torch's class."""
    return torch.npu.Stream(
        stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
    )


def identity(stream: Any) -> tuple[int, int]:
    """A value that is equal for two objects of one stream, whatever their class."""
    return stream.device_index, stream.stream_id


def _pattern(things: Sequence[Any]) -> tuple[int, ...]:
    """For each item, the first position of an equal item."""
    return tuple(things.index(thing) for thing in things)
