"""Random graphs of several streams: values, views, in-place and out variants on any stream. Events, forks, joins may be missing."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch import fx

from npugraph_ex.graph.streams.events import MAIN, stream_of
from npugraph_ex.testing.arguments import checked
from npugraph_ex.testing.generator.choices import Choices, Drawn, Sampled
from npugraph_ex.testing.streams.builder import StreamBuilder

SIZE = 8
"""Every value has so many elements, and every view of one half as many."""

_HALVES = ((0, 4, 1), (4, 8, 1), (0, 8, 2), (1, 8, 2), (2, 6, 1))
"""Start, stop and step of the views: halves, even and odd elements, and the middle, which meets all the others."""

aten = torch.ops.aten


class _Writer:
    """One random graph in the making.

    Args:
        choices: what decides.
        keep: every value is an output. Otherwise values die soon, and streams mostly wait for what they read: what is left
            to go wrong is the use of their memory by others.
    """

    def __init__(self, choices: Choices, *, keep: bool) -> None:
        self._choices = choices
        self._keep = keep
        self._builder = StreamBuilder()
        self._sides = ["a", "b", "c"][: choices.number(1, 3)]
        self._values: list[fx.Node] = []

    def write(self) -> fx.GraphModule:
        b, choices = self._builder, self._choices
        inputs = [b.input(SIZE) for _ in range(choices.number(1, 2))]
        self._values = [*inputs, *(b.call(aten.mul.Tensor, given, 2) for given in inputs)]
        closed = choices.chance(60)  # or the compiler's part, forks and joins, is not all there
        b.fork(*(side for side in self._sides if closed or choices.chance(70)))
        events = choices.number(0, 3)
        for _ in range(choices.number(2, 10)):
            with b.on(choices.pick([*self._sides, MAIN])):
                steps = (self._compute, self._update, self._fill_part, self._overwrite)
                choices.pick(steps if self._keep else (self._compute,) * 4 + steps)()
                if choices.chance(12):
                    self._look()
            for _ in range(events if self._keep else 0):
                b.order(*choices.order([MAIN, *self._sides])[:2])
        b.join(*(side for side in self._sides if closed or choices.chance(70)))
        outputs = self._values[len(inputs) :] if self._keep else [self._values[-1]]
        return b.finish(*outputs)

    def _operands(self) -> list[fx.Node]:
        """Values in a random order: all, or the latest few, for which the current stream then mostly waits."""
        found = self._choices.order(self._values[::-1] if self._keep else self._values[-3:])
        for value in () if self._keep else found[:1]:
            if stream_of(value) != self._builder.stream and self._choices.chance(90):
                self._builder.order(stream_of(value), self._builder.stream)
        return found

    def _part(self, value: fx.Node) -> fx.Node:
        return self._builder.call(aten.slice.Tensor, value, 0, *self._choices.pick(_HALVES))

    def _quarter(self, value: fx.Node, number: int, *, strided: bool) -> fx.Node:
        """One of four disjoint parts of two elements: a slice, a row or a column, or a view of views."""
        b, way = self._builder, self._choices.number(0, 2)
        if strided:
            if way == 0:
                return b.call(aten.slice.Tensor, value, 0, number, SIZE, 4)
            columns = b.call(aten.view.default, value, [2, 4])
            if way == 1:
                return b.call(aten.select.int, columns, 1, number)
            return b.call(aten.select.int, b.call(aten.t.default, columns), 0, number)
        if way == 0:
            return b.call(aten.slice.Tensor, value, 0, 2 * number, 2 * number + 2)
        if way == 1:
            return b.call(aten.select.int, b.call(aten.view.default, value, [4, 2]), 0, number)
        half = b.call(aten.select.int, b.call(aten.view.default, value, [2, 4]), 0, number // 2)
        return b.call(aten.slice.Tensor, half, 0, number % 2 * 2, number % 2 * 2 + 2)

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
        elif self._choices.chance(25):  # one element, or none
            target = self._builder.call(aten.slice.Tensor, target, 0, 3, self._choices.pick((4, 3)))
        self._builder.call(aten.mul_.Tensor, target, self._choices.pick((3, 5, 7)))

    def _fill_part(self) -> None:
        target, source = (self._operands() * 2)[:2]
        if target is not source:  # an operator may not read what it fills
            self._builder.call(aten.add.out, self._part(source), 1, out=self._part(target))

    def _overwrite(self) -> None:
        target, source = (self._operands() * 2)[:2]
        self._builder.call(aten.copy_.default, target, source)

    def _look(self) -> None:
        """What starts no work: a view, a query of a size, the notice that a stream uses a value."""
        b, value, way = self._builder, self._operands()[0], self._choices.number(0, 2)
        if way == 0:
            b.call(aten.alias.default, value)
        elif way == 1:
            b.call(aten.sym_size.int, value, 0)
        else:
            b.uses(self._choices.pick(self._sides), value)

    def write_parts(self) -> fx.GraphModule:
        """Streams that are forked and joined write parts of one buffer, an input or the graph's own, in place."""
        b, choices = self._builder, self._choices
        buffer, other = b.input(SIZE), b.input(SIZE)
        if choices.chance(50):
            buffer = b.call(aten.mul.Tensor, buffer, 3)
        b.fork(*self._sides)
        streams = [MAIN, *self._sides]
        strided = choices.chance(40)
        for _ in range(choices.number(2, 7)):
            own = choices.number(0, len(streams) - 1)
            with b.on(streams[own]):
                self._change(buffer, other, own if choices.chance(90) else choices.number(0, 3), strided=strided)
            if choices.chance(10):
                b.order(*choices.order(streams)[:2])
        if len(self._values) > 1 and choices.chance(60):  # of values that nobody else has, of any stream
            with b.on(choices.pick(streams)):
                self._values = [b.call(aten.cat.default, self._values)]
        b.join(*self._sides)
        return b.finish(b.call(aten.add.Tensor, buffer, 1), *self._values)

    def _change(self, buffer: fx.Node, other: fx.Node, number: int, *, strided: bool) -> None:
        """Write one part of the buffer, or read it."""
        b, choices = self._builder, self._choices
        way = choices.number(0, 7)
        target = self._quarter(buffer, number, strided=strided)
        if way in (6, 7):  # as a whole, for which it has to wait for everybody
            target = buffer
        elif way >= 2 and choices.chance(20):  # one element of the part, or none
            target = b.call(aten.slice.Tensor, target, 0, 0, choices.number(0, 1))
        if way == 0:
            b.call(aten.copy_.default, target, self._quarter(other, choices.number(0, 3), strided=strided))
        elif way == 1:
            b.call(aten.add_.Tensor, target, self._quarter(other, choices.number(0, 3), strided=strided))
        elif way in (2, 6):
            b.call(aten.mul_.Tensor, target, choices.pick((3, 5, 7)))
        elif way == 5:
            self._fill_by_index(target, self._quarter(other, choices.number(0, 3), strided=strided))
        else:
            self._values.append(b.call(aten.add.Tensor, target, 1))

    def _fill_by_index(self, target: fx.Node, numbers: fx.Node) -> None:
        """Write elements that only the call knows."""
        b = self._builder
        size = max(1, target.meta["val"].shape[0])
        index = b.call(aten._to_copy.default, b.call(aten.remainder.Scalar, numbers, size), dtype=torch.int64)  # noqa: SLF001
        if target.meta["val"].shape[0]:
            b.call(aten.index_fill_.int_Scalar, target, 0, index, 9)


def sample_parts_graph(seed: object) -> fx.GraphModule:
    """One random graph in which several streams write parts of one buffer."""
    return _Writer(Choices(Sampled(seed)), keep=True).write_parts()


def sample_stream_graph(seed: object, *, keep: bool) -> fx.GraphModule:
    """One of the graphs of `stream_graphs`, always the same for a seed."""
    return _Writer(Choices(Sampled(seed)), keep=keep).write()


@st.composite
def parts_graphs(draw: Any) -> fx.GraphModule:
    """Random graphs in which several streams write parts of one buffer; they shrink."""
    return _Writer(Choices(Drawn(draw)), keep=True).write_parts()


@checked
def stream_graphs(*, keep: bool = True) -> st.SearchStrategy[fx.GraphModule]:
    """Random graphs, which shrink.

    Args:
        keep: every value is an output, so that no memory is used again inside the graph; otherwise they die soon.
    """
    return _drawn(keep)


@st.composite
def _drawn(draw: Any, keep: bool) -> fx.GraphModule:  # noqa: FBT001 - drawn from, not called
    return _Writer(Choices(Drawn(draw)), keep=keep).write()
