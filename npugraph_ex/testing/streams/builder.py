"""Writes small FX graphs of several streams, node by node, in the representation of `npugraph_ex.graph.streams.events`.

It takes scopes and tagged events too, as a user writes them; the library's own passes lower them at the end.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import fx
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from npugraph_ex.config import CompilerConfig
from npugraph_ex.graph.streams.labels import CUBE, MAIN, PRIORITY, STREAM, VECTOR
from npugraph_ex.graph.streams.ops import ENTERS, EXITS, RECORD_STREAMS, RECORDS, TAGGED_RECORDS, TAGGED_WAITS, WAITS
from npugraph_ex.passes import events, scopes
from npugraph_ex.passes.base import PassContext
from npugraph_ex.testing.arguments import checked


class StreamBuilder:
    """A graph in the making. Values are int32, so that a wrong order is an exact difference.

    Args:
        device: of the fake tensors that the nodes carry.
        shapes: where symbols come from, if sizes are to have any.
    """

    @checked
    def __init__(self, *, device: str = "npu", shapes: ShapeEnv | None = None) -> None:
        self._graph = fx.Graph()
        self._shapes = ShapeEnv() if shapes is None else shapes
        self._mode = FakeTensorMode(shape_env=self._shapes)
        self._device = device
        self._stream = MAIN
        self._spelt = False  # whether anything is to be lowered

    def __len__(self) -> int:
        """How many nodes were added so far."""
        return len(self._graph.nodes)

    @property
    def stream(self) -> str:
        """The stream on which the next node stands."""
        return self._stream

    @checked
    def symbol(self, example: int) -> int | torch.SymInt:
        """A size that is a symbol, with its value in the example inputs."""
        source = ConstantSource(f"size_{len(self._graph.nodes)}")
        symbol = self._shapes.create_symbol(example, source, dynamic_dim=DimDynamic.DYNAMIC)
        return self._shapes.create_symintnode(symbol, hint=example)

    @checked
    def input(self, *size: int | torch.SymInt) -> fx.Node:
        """Add an input of the graph. Inputs come before everything else."""
        node = self._graph.placeholder(f"x{len(self._graph.nodes)}")
        with self._mode:
            node.meta["val"] = torch.empty(size, dtype=torch.int32, device=self._device)
        return node

    @checked
    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        """Put the nodes that are added in the block onto a stream."""
        outer, self._stream = self._stream, stream
        try:
            yield
        finally:
            self._stream = outer

    @checked
    def scope(self, stream: str, *, priority: int | None = None) -> AbstractContextManager[None]:
        """Enclose what is added in the block in a scope that names a stream, as `npu_stream_switch` does."""
        said = {STREAM: stream} if priority is None else {STREAM: stream, PRIORITY: str(priority)}
        return self._enclosed(said)

    @checked
    def limit(self, cube: int, vector: int) -> AbstractContextManager[None]:
        """Enclose what is added in the block in a scope that limits cores, as `limit_core_num` does."""
        return self._enclosed({CUBE: str(cube), VECTOR: str(vector)})

    @contextmanager
    def _enclosed(self, said: Mapping[str, str]) -> Iterator[None]:
        self._spelt = True
        self._graph.call_function(ENTERS[0], (list(said), list(said.values())))
        yield
        self._graph.call_function(EXITS[0])

    @checked
    def tagged_record(self, tag: str) -> None:
        """Record the event of a tag on the stream of the scope around it."""
        self._spelt = True
        self._graph.call_function(TAGGED_RECORDS[0], (tag,))

    @checked
    def tagged_wait(self, tag: str) -> None:
        """Make the stream of the scope around it wait for the latest record of a tag."""
        self._graph.call_function(TAGGED_WAITS[0], (tag,))

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Add a call of an operator on the current stream; its result's metadata comes from fake execution."""
        node = self._labelled(self._graph.call_function(target, args, kwargs))
        fake_args, fake_kwargs = fx.node.map_arg((args, kwargs), lambda argument: argument.meta["val"])
        with self._mode:
            node.meta["val"] = target(*fake_args, **fake_kwargs)
        return node

    @checked
    def item(self, value: fx.Node, number: int) -> fx.Node:
        """Add the choice of one result of an operator that has several."""
        node = self._labelled(self._graph.call_function(operator.getitem, (value, number)))
        node.meta["val"] = value.meta["val"][number]
        return node

    def record(self) -> fx.Node:
        """Record an event on the current stream."""
        return self._labelled(self._graph.call_function(RECORDS[0]))

    @checked
    def wait(self, *records: fx.Node) -> fx.Node:
        """Make the current stream wait for events, or for what computes other tensors."""
        return self._labelled(self._graph.call_function(WAITS[0], (list(records),)))

    @checked
    def uses(self, stream: str, value: fx.Node) -> None:
        """Tell the allocator that a stream uses a value."""
        self._graph.call_function(RECORD_STREAMS[0], (value, stream))

    @checked
    def order(self, earlier: str, later: str) -> None:
        """Make one stream wait for all work that another has so far."""
        with self.on(earlier):
            record = self.record()
        with self.on(later):
            self.wait(record)

    @checked
    def fork(self, *streams: str) -> None:
        """Make streams wait for the main one."""
        for stream in streams:
            self.order(MAIN, stream)

    @checked
    def join(self, *streams: str) -> None:
        """Make the main stream wait for others."""
        for stream in streams:
            self.order(stream, MAIN)

    @checked
    def finish(self, *outputs: fx.Node) -> fx.GraphModule:
        """Close the graph with its outputs, and lower what a user would write."""
        self._graph.output(outputs)
        gm = fx.GraphModule(torch.nn.Module(), self._graph)
        context = PassContext(CompilerConfig().to_options(), [])
        for run in (scopes.label, events.run) if self._spelt else ():
            run(gm, context)
        gm.graph.lint()
        gm.recompile()
        return gm

    def _labelled(self, node: fx.Node) -> fx.Node:
        if self._stream != MAIN:
            node.meta["stream_label"] = self._stream
        return node
