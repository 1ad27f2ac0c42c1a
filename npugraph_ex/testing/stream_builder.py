"""Writes small FX graphs of several streams, in the representation of `npugraph_ex.streams.events`, node by node."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from npugraph_ex.streams.events import MAIN
from npugraph_ex.streams.ops import RECORD_STREAMS, RECORDS, WAITS


class StreamBuilder:
    """A graph in the making. Values are int32, so that a wrong order is an exact difference.

    Args:
        device: of the fake tensors that the nodes carry.
        shapes: where symbols come from, if sizes are to have any.
    """

    def __init__(self, *, device: str = "npu", shapes: ShapeEnv | None = None) -> None:
        self._graph = fx.Graph()
        self._mode = FakeTensorMode(shape_env=shapes)
        self._device = device
        self._stream = MAIN

    def __len__(self) -> int:
        """How many nodes were added so far."""
        return len(self._graph.nodes)

    def input(self, *size: int) -> fx.Node:
        """Add an input of the graph. Inputs come before everything else."""
        node = self._graph.placeholder(f"x{len(self._graph.nodes)}")
        with self._mode:
            node.meta["val"] = torch.empty(size, dtype=torch.int32, device=self._device)
        return node

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        """Put what is added in the block onto a stream."""
        outer, self._stream = self._stream, stream
        try:
            yield
        finally:
            self._stream = outer

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Add a call of an operator on the current stream; its result's metadata comes from fake execution."""
        node = self._labelled(self._graph.call_function(target, args, kwargs))
        fake_args, fake_kwargs = fx.node.map_arg((args, kwargs), lambda argument: argument.meta["val"])
        with self._mode:
            node.meta["val"] = target(*fake_args, **fake_kwargs)
        return node

    def item(self, value: fx.Node, number: int) -> fx.Node:
        """Add the choice of one result of an operator that has several."""
        node = self._labelled(self._graph.call_function(operator.getitem, (value, number)))
        node.meta["val"] = value.meta["val"][number]
        return node

    def record(self) -> fx.Node:
        """Record an event on the current stream."""
        return self._labelled(self._graph.call_function(RECORDS[0]))

    def wait(self, *records: fx.Node) -> fx.Node:
        """Make the current stream wait for events."""
        return self._labelled(self._graph.call_function(WAITS[0], (list(records),)))

    def uses(self, stream: str, value: fx.Node) -> None:
        """Tell the allocator that a stream uses a value."""
        self._graph.call_function(RECORD_STREAMS[0], (value, stream))

    def order(self, earlier: str, later: str) -> None:
        """Make one stream wait for all that another was given so far."""
        with self.on(earlier):
            record = self.record()
        with self.on(later):
            self.wait(record)

    def fork(self, *streams: str) -> None:
        """Make streams wait for the main one."""
        for stream in streams:
            self.order(MAIN, stream)

    def join(self, *streams: str) -> None:
        """Make the main stream wait for others."""
        for stream in streams:
            self.order(stream, MAIN)

    def finish(self, *outputs: fx.Node) -> fx.GraphModule:
        """Close the graph with its outputs."""
        self._graph.output(outputs)
        self._graph.lint()
        return fx.GraphModule(torch.nn.Module(), self._graph)

    def _labelled(self, node: fx.Node) -> fx.Node:
        if self._stream != MAIN:
            node.meta["stream_label"] = self._stream
        return node
