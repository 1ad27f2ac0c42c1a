"""Random graphs of several streams: values, views, in-place and out variants on any stream, and events that may be missing."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch import fx

from npugraph_ex.streams.events import MAIN
from npugraph_ex.testing.choices import Choices, Drawn, Sampled
from npugraph_ex.testing.stream_builder import StreamBuilder

SIZE = 8
"""Every value has so many elements, and every view of one half as many."""

_HALVES = ((0, 4, 1), (4, 8, 1), (0, 8, 2), (1, 8, 2), (2, 6, 1))
"""Start, stop and step of the views: halves, even and odd elements, and the middle, which meets all the others."""

aten = torch.ops.aten


class _Writer:
    """One random graph in the making."""

    def __init__(self, choices: Choices) -> None:
        self._choices = choices
        self._builder = StreamBuilder()
        self._sides = ["a", "b", "c"][: choices.number(1, 3)]
        self._values: list[fx.Node] = []

    def write(self, *, keep: bool) -> fx.GraphModule:
        b, choices = self._builder, self._choices
        inputs = [b.input(SIZE) for _ in range(choices.number(1, 2))]
        self._values = [b.call(aten.mul.Tensor, given, 2) for given in inputs]
        b.fork(*self._sides)
        events = choices.number(0, 3)
        for _ in range(choices.number(2, 10)):
            with b.on(choices.pick([*self._sides, MAIN])):
                choices.pick((self._compute, self._update, self._fill_part, self._overwrite))()
            for _ in range(events):
                b.order(*choices.order([MAIN, *self._sides])[:2])
        b.join(*self._sides)
        outputs = self._values if keep else [value for value in self._values if choices.chance(40)]
        return b.finish(*outputs)

    def _operands(self) -> list[fx.Node]:
        """All values, the latest first, in a random order."""
        return self._choices.order(self._values[::-1])

    def _part(self, value: fx.Node) -> fx.Node:
        return self._builder.call(aten.slice.Tensor, value, 0, *self._choices.pick(_HALVES))

    def _compute(self) -> None:
        left, right = (self._operands()[0] for _ in range(2))
        if self._choices.chance(30):
            self._values.append(self._builder.call(aten.cat.default, [self._part(left), self._part(right)]))
        else:
            self._values.append(self._builder.call(aten.add.Tensor, left, right))

    def _update(self) -> None:
        target = self._operands()[0]
        if self._choices.chance(60):
            target = self._part(target)
        self._builder.call(aten.mul_.Tensor, target, self._choices.pick((3, 5, 7)))

    def _fill_part(self) -> None:
        target, source = (self._operands() * 2)[:2]
        if target is not source:  # an operator may not read what it fills
            self._builder.call(aten.add.out, self._part(source), 1, out=self._part(target))

    def _overwrite(self) -> None:
        target, source = (self._operands() * 2)[:2]
        self._builder.call(aten.copy_.default, target, source)


def sample_stream_graph(seed: object, *, keep: bool = True) -> fx.GraphModule:
    """One random graph.

    Args:
        seed: the same seed gives the same graph.
        keep: every value is an output, so that no memory is used again inside the graph.
    """
    return _Writer(Choices(Sampled(seed))).write(keep=keep)


@st.composite
def stream_graphs(draw: Any, *, keep: bool = True) -> fx.GraphModule:
    """Random graphs, which shrink; ``keep`` as in `sample_stream_graph`."""
    return _Writer(Choices(Drawn(draw))).write(keep=keep)


def inputs_of(gm: fx.GraphModule) -> list[torch.Tensor]:
    """CPU inputs for a graph: 1, 2, 3 …, each input with other numbers."""
    fakes = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    return [
        torch.arange(1, fake.numel() + 1, dtype=torch.int32).reshape(fake.shape) + 100 * number
        for number, fake in enumerate(fakes)
    ]
