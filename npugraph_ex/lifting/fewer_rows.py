"""Fewer rows of large tensors, where rows are computed one by one: what is judged of some holds for all.

A row of a norm, a head of attention, a column of a product: an operator computes each of them alike, whatever the others are. Of
such axes a trial takes a few elements. All others have the graph's own size: where a sum goes over 4096 elements, it does so in
the trial, because how many these are decides what is rounded. `dataflow.py` tells which is which, of the spelling and of the
operator together: an axis that either of them mixes stays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from npugraph_ex.lifting.axes import Axis, same
from npugraph_ex.lifting.dataflow import Axes, Dataflow
from npugraph_ex.lifting.subgraph import SIZED

LARGE = 1 << 15
"""Elements of a tensor from which on fewer rows are taken, as long as others have as many."""
_FEWEST = 3
"""Rows, and one more for each further axis, so that no two are exchanged unseen."""


@dataclass(frozen=True)
class FewerRows:
    """Graphs that compute some of the rows, and the sizes of their inputs."""

    shapes: tuple[tuple[int, ...] | None, ...]
    graphs: tuple[fx.Graph, ...]


def fewer(graphs: Sequence[fx.Graph], values: Sequence[Any], kept: Sequence[int]) -> FewerRows:
    """As few rows of each axis along which nothing is mixed as let no input be large.

    Args:
        graphs: the spelling, whose placeholders have these values, and the operator, which has the first of them.
        values: a tensor of any device for its shape and dtype, or a number.
        kept: sizes that an argument of an operator names, such as the number of heads: they stay.
    """
    shapes = tuple(tuple(value.shape) if isinstance(value, torch.Tensor) else None for value in values)
    whole = FewerRows(shapes, tuple(graphs))
    if max((math.prod(shape) for shape in shapes if shape is not None), default=0) <= LARGE:
        return whole
    try:
        few = _few(graphs, values, {*kept})
        return few if few is not None and _fits(few, values) else whole
    except Exception:  # noqa: BLE001 - an operator that needs values says nothing of its axes, so that all of them stay
        return whole


def _few(graphs: Sequence[fx.Graph], values: Sequence[Any], kept: set[int]) -> FewerRows | None:
    flow = Dataflow()
    inputs = [flow.input(value.shape, value.dtype) if isinstance(value, torch.Tensor) else value for value in values]
    axes = [flow.axes(value) if isinstance(value, torch.Tensor) else None for value in inputs]
    sized = [_sized_nodes(graph) for graph in graphs]
    made: list[list[Axes]] = []
    results: list[list[Axes]] = []
    for graph, nodes in zip(graphs, sized, strict=True):
        given = inputs[: len(graph.find_nodes(op="placeholder"))]
        found = flow.run(_giving(graph, nodes), given)
        made.append([_written_axes(flow, *pair) for pair in zip(nodes, found, strict=False)])
        results.append([flow.axes(value) for value in found[len(nodes) :] if isinstance(value, torch.Tensor)])
    _walk_together(results)
    number = _RowCounts([one for one in axes if one is not None], kept)
    shapes = tuple(None if one is None else tuple(axis.counted(number) for axis in one) for one in axes)
    copies = tuple(_resized(*each, number) for each in zip(graphs, sized, made, strict=True))
    return FewerRows(shapes, copies)


def _walk_together(results: Sequence[Sequence[Axes]]) -> None:
    """The results of the graphs are compared, so that the axes of one are those of the other."""
    for pair in zip(*results, strict=False):
        for one, other in zip(*pair, strict=True):
            same(one, other)


class _RowCounts:
    """How many elements of each axis without parts a trial has."""

    def __init__(self, inputs: Sequence[Axes], kept: set[int]) -> None:
        wholes = {
            whole: None
            for axes in inputs
            for axis in axes
            if axis.size not in kept
            for whole in axis.wholes()
            if not whole.mixed and whole.size not in kept
        }
        self._number: dict[Axis, int] = {}
        times = 1
        while True:
            before, self._number = self._number, {}
            for at, whole in enumerate(sorted(wholes, key=lambda one: len(one.addressed_by))):
                places = math.prod(axis.counted(self) for axis in whole.addressed_by)
                self._number[whole] = min(whole.size, max((_FEWEST + at) * times, places))
            if times > 1 and (self._number == before or self._largest(inputs) > LARGE):
                self._number = before
                return
            times *= 2

    def __call__(self, axis: Axis) -> int:
        return self._number.get(axis, axis.size)

    def _largest(self, inputs: Sequence[Axes]) -> int:
        return max(math.prod(axis.counted(self) for axis in axes) for axes in inputs)


def _sized_nodes(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.target in SIZED]


def _written_axes(flow: Dataflow, node: fx.Node, value: Any) -> Axes:
    """The axes of the sizes that a node writes down: of its result, or of the parts that it splits a dimension into."""
    if isinstance(value, torch.Tensor):
        return flow.axes(value)
    dim = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)
    return tuple(flow.axes(part)[dim] for part in value)  # type: ignore[index]  # a number


def _giving(graph: fx.Graph, nodes: Sequence[fx.Node]) -> fx.Graph:
    """A copy that also gives the values of these nodes, first."""
    copy, twins = fx.Graph(), dict[fx.Node, fx.Node]()
    results = copy.graph_copy(graph, twins)
    copy.output((*(twins[node] for node in nodes), *results))  # type: ignore[misc]  # a tuple of nodes
    return copy


def _resized(graph: fx.Graph, nodes: Sequence[fx.Node], axes: Sequence[Axes], number: _RowCounts) -> fx.Graph:
    """A copy in which the sizes that these nodes write down are those of the rows."""
    copy, twins = fx.Graph(), dict[fx.Node, fx.Node]()
    results = copy.graph_copy(graph, twins)
    copy.output(results)
    for node, own in zip(nodes, axes, strict=True):
        twins[node].update_arg(SIZED[node.target], [axis.counted(number) for axis in own])  # type: ignore[index]
    return copy


def _fits(rows: FewerRows, values: Sequence[Any]) -> bool:
    """Whether the graphs run on so many rows."""
    flow = Dataflow()
    inputs = [
        value if shape is None else flow.input(shape, value.dtype)
        for value, shape in zip(values, rows.shapes, strict=True)
    ]
    for graph in rows.graphs:
        flow.run(graph, inputs[: len(graph.find_nodes(op="placeholder"))])
    return True
