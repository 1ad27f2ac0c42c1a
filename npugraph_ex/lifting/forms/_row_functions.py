"""Finds by its values what number a program multiplies each row by, where no normal form of its operators says it.

The number is computed of the row alone. It runs in float64 on rows of several sizes, and is the divisor of a norm where one of
these holds in all of them, with numbers a > 0 and b >= 0, and ``m`` the mean of the squares of a row::

    number^-2 = a m + b                 epsilon under the root
    1 / number = sqrt(a m) + b          epsilon added to the root
    1 / number = max(sqrt(a m), b)      a least root

Another function of ``m`` is told as such; a function of something else, such as the divisor of a softmax, is none of a norm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import fx

from npugraph_ex.graph.memory.aliases import tensor_leaves
from npugraph_ex.lifting import terms, trials
from npugraph_ex.lifting.fewer_rows import fewer
from npugraph_ex.lifting.proposal import Proposal
from npugraph_ex.lifting.subgraph import Subgraph
from npugraph_ex.operators import PreparedGraph

_MOST_OPERATORS = 24
_MOST_ELEMENTS = 1 << 20
_SAME = 2.0**-22
"""Of float32 numbers, such as one divided by a size, that a program multiplies by."""


@dataclass(frozen=True)
class RowFunction:
    """What the number is of the mean of squares; ``kind`` is "under", "outside", "least" or, where it is no norm's, the values."""

    kind: str
    times: float = 0.0
    epsilon: float = 0.0


def read_alone(node: fx.Node) -> Iterator[fx.Node]:
    """Nodes of which alone ``node`` is computed, by few operators, the nearest first; constants do not count."""
    frontier = {node}
    for _ in range(_MOST_OPERATORS):
        latest = max(frontier)
        frontier.remove(latest)
        if latest.op != "call_function":
            return
        frontier |= {one for one in latest.all_input_nodes if tensor_leaves(one) and trials.uniform(one) is None}
        if not frontier:
            return
        if len(frontier) == 1:
            yield next(iter(frontier))


def row_function(node: fx.Node, x: fx.Node, *, divides: bool) -> RowFunction | None:
    """``node`` as a number for each row of ``x``, which it multiplies or divides; None where it is no function of their means.

    ``node`` is as it was before it was repeated along a row, and computed of ``x`` alone.
    """
    value, number = terms.tensor(x), terms.tensor(node)
    if value is None or number is None or not value.dim() or not value.is_floating_point():
        return None
    if not isinstance(value.shape[-1], int):
        return None
    if not terms.same_size(number.numel() * value.shape[-1], value.numel()):
        return None
    with trials.on_real_values():
        try:
            function = _function(node, x, divides=divides)
            return None if function is None else _found(*function)
        except Exception:  # noqa: BLE001 - an operator that the CPU lacks says nothing
            return None


_Function = Callable[[torch.Tensor], torch.Tensor]


def _function(node: fx.Node, x: fx.Node, *, divides: bool) -> tuple[_Function, torch.Tensor] | None:
    """One divided by the number, of rows [n, size] as [n], in float64; and rows to try it on."""
    subgraph = Subgraph.of(Proposal((x,), (node,), ()))
    if isinstance(subgraph, str):
        return None
    at = next(iter(trials.sizes(subgraph.inputs)))
    values = [
        torch.empty(at.shape(one), dtype=given.dtype, device="meta")
        if isinstance(given, torch.Tensor)
        else at.of(given)
        for one in subgraph.inputs
        for given in (one.meta["val"],)
    ]
    few = fewer((subgraph.alone(at.of),), values, ())
    shape = few.shapes[0] or ()
    if math.prod(shape) > _MOST_ELEMENTS or shape[-1:] != tuple(x.meta["val"].shape[-1:]):
        return None
    constants = [
        value if size is None else trials.uniform(one).expand(size).to(torch.float64)  # type: ignore[union-attr]
        for one, value, size in zip(subgraph.inputs[1:], values[1:], few.shapes[1:], strict=True)
    ]
    graph = PreparedGraph(few.graphs[0], wide=True)

    def inverse(rows: torch.Tensor) -> torch.Tensor:
        number: torch.Tensor = graph.run(rows.view(shape), *constants)[0].flatten()
        return number if divides else 1 / number

    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(math.prod(shape[:-1]), shape[-1], generator=generator, dtype=torch.float64)
    return inverse, rows


def _found(inverse: _Function, rows: torch.Tensor) -> RowFunction | None:
    """Which function it is; one that other rows change, or signs, or how a row's squares are spread, is none."""
    sizes = torch.logspace(-2, 0.5, len(rows), dtype=torch.float64) if len(rows) > 1 else torch.ones(1)
    rows = rows * sizes.unsqueeze(-1)
    alone = rows.clone()
    alone[-1] *= 2
    means = rows.square().mean(-1)
    own, changed, level = inverse(rows), inverse(alone), means.sqrt().unsqueeze(-1).expand_as(rows)
    of_its_own_row = _same(changed[:-1], own[:-1]) and _same(inverse(rows.roll(1, 0)), own.roll(1, 0))
    if (
        not own.isfinite().all()
        or not of_its_own_row
        or _same(changed[-1:], own[-1:])
        or not _same(inverse(level), own)
    ):
        return None
    least = float(inverse(torch.zeros_like(rows))[0])
    for kind, shown in (("under", torch.square), ("outside", lambda value: value), ("least", lambda value: value)):
        found = _fitted(kind, shown, inverse, rows, least)
        if found is not None:
            return found
    one, two = (1 / float(inverse(torch.full_like(rows, size))[0]) for size in (1.0, 2.0))
    return RowFunction(f"{one:.6g} where that is 1, and {two:.6g} where it is 4")


def _fitted(
    kind: str, shown: Callable[[torch.Tensor], torch.Tensor], inverse: _Function, rows: torch.Tensor, least: float
) -> RowFunction | None:
    """The function of this kind, where it is one: of rows as they are, and near the least value."""
    at_zero = float(shown(torch.tensor(least, dtype=torch.float64)))
    if not 0 <= at_zero < math.inf:
        return None
    power = 1.0 if kind == "under" else 0.5
    means = rows.square().mean(-1)
    largest = int(means.argmax())
    added = 0.0 if kind == "least" else at_zero
    times = float(((shown(inverse(rows)) - added) / means**power)[largest])
    if times <= 0:
        return None
    times = 1.0 if math.isclose(times, 1.0, rel_tol=_SAME) else times
    near = (at_zero / times) ** (1 / power) or 1.0
    for scaled in (rows, *(rows * (near * by / means).sqrt().unsqueeze(-1) for by in (0.25, 1.0, 4.0, 100.0))):
        right = times * scaled.square().mean(-1) ** power
        right = right.clamp(min=at_zero) if kind == "least" else right + at_zero
        if not _same(shown(inverse(scaled)), right):
            return None
    return RowFunction(kind, times ** (1 / power), float(f"{at_zero:.12g}"))


def _same(values: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.allclose(values, right, rtol=_SAME, atol=0.0)
