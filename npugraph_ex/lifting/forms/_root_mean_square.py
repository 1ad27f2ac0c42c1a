"""Reads the divisor of a norm: the root mean square of each row, by squares or by the row's length, and where its epsilon is.

::

    sqrt(mean(x^2) + epsilon)          what a norm divides by; mean(x^2) may be a sum, or a length's square, divided by the size
    length(x) / sqrt(size)             the same without epsilon
    sqrt(mean(x^2)) + epsilon          another function, as is
    max(sqrt(mean(x^2)), epsilon)      but where no row is near epsilon
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import fx

from npugraph_ex.graph.metadata import same_numbers
from npugraph_ex.lifting import terms
from npugraph_ex.lifting.proposal import Unlike

_aten = torch.ops.aten
ADDED_UP = "the squares are added up, and not divided by how many they are"


@dataclass(frozen=True)
class Root:
    """A factor that is one divided by a root: the node in the product, and what the root is of."""

    node: fx.Node
    under: fx.Node


@dataclass(frozen=True)
class MeanSquare:
    """``times`` the mean of the squares of ``x`` over ``dims``; ``times`` is None where it is no known number."""

    x: fx.Node
    dims: tuple[int, ...]
    times: float | None


@dataclass(frozen=True)
class RowDivisor:
    """What each row of a product is divided by.

    Attributes:
        node: it, or one divided by it, in the product.
        square: its square without the epsilon.
        epsilon: added to the square, unless one of the next two says otherwise.
        outside: whether it is added to the root.
        least: whether the root is at least that.
    """

    node: fx.Node
    square: MeanSquare
    epsilon: float = 0.0
    outside: bool = False
    least: bool = False

    @property
    def over_others(self) -> str:
        """Over what the mean is, if not over the last dimension; otherwise empty."""
        dims, rank = self.square.dims, self.square.x.meta["val"].dim()
        where = f"the mean is over the dimensions {list(dims)} of {rank}; the operator normalises the last one"
        return "" if dims == (rank - 1,) else where


def roots(factors: terms.Product) -> Iterator[Root]:
    """The inverse roots among the factors."""
    for node in factors.factors:
        inner = _unexpanded(node)
        under = terms.inverse_root_of(inner)
        if under is None and inner is not terms.core(node):
            under = _divided_by(inner)
        if under is not None:
            yield Root(node, under)
    for node in factors.divisors:
        under = terms.root_of(_unexpanded(node))
        if under is not None:
            yield Root(node, under)


def row_divisors(factors: terms.Product) -> Iterator[RowDivisor | Unlike]:
    """What looks like the root mean square of a row among the factors, the likest first."""
    for root in roots(factors):
        found = root_mean_square(root)
        if found is not None:
            yield found
    for node in factors.divisors:
        whole = _unexpanded(node)
        if terms.root_of(whole) is not None:
            continue
        added, bound = terms.plus_number(whole), terms.at_least(whole)
        length, epsilon = added or bound or (whole, 0.0)
        square, bounded = _squared_length(length), bound is not None and epsilon > 0
        if square is not None and _holds(factors, square.x):
            yield RowDivisor(node, square, max(epsilon, 0.0), outside=added is not None, least=bounded)


def _divided_by(node: fx.Node) -> fx.Node | None:
    """``x`` where ``node`` is one divided by its square root, in two operators."""
    parts = terms.product(node)
    alone = parts.scale == 1.0 and not parts.factors and len(parts.divisors) == 1
    return terms.root_of(parts.divisors[0]) if alone else None


def _holds(factors: terms.Product, x: fx.Node) -> bool:
    """Whether all factors of ``x`` are there: programs divide other things by its length, too."""
    there = [terms.row_core(one) for one in factors.factors]
    return all(terms.row_core(one) in there for one in terms.product(x).factors)


def root_mean_square(root: Root) -> RowDivisor | Unlike | None:
    """A root of squares; None where it is of something else."""
    added, bound = terms.plus_number(root.under), terms.at_least(root.under)
    under, epsilon = added or bound or (root.under, 0.0)
    square = _mean_square(under)
    if square is None:
        return _epsilon_unknown(root)
    if bound is not None:
        return RowDivisor(root.node, square, math.sqrt(max(epsilon, 0.0)), least=epsilon > 0)
    return RowDivisor(root.node, square, epsilon)


def _unexpanded(node: fx.Node) -> fx.Node:
    """The node before it was repeated along its last dimension, or before it got one: a number for each row."""
    inner = terms.core(node)
    while terms.calls(inner, _aten.expand.default) or _has_one_for_each_row(inner):
        inner = terms.core(inner.args[0])  # type: ignore[arg-type]
    return inner


def _has_one_for_each_row(node: fx.Node) -> bool:
    """Whether it is a reshape to a last dimension of one element: of one that has it, too, or that has none for it."""
    value = terms.tensor(node)
    old = terms.tensor(node.args[0]) if terms.calls(node, *terms.RESHAPES) else None
    if value is None or old is None or not value.dim() or not terms.same_size(value.shape[-1], 1):
        return False
    return same_numbers(value.shape, (*old.shape, 1)) or same_numbers(old.shape[-1:], (1,))


def _mean_square(node: fx.Node) -> MeanSquare | None:
    """``node`` as a mean of squares, a sum of them, or the square of a length; with a positive factor."""
    found = terms.mean(node)
    if found is not None:
        x = terms.square_of(found.of)
        return None if x is None else _times(MeanSquare(x, found.dims, found.times), 1.0)
    parts = terms.product(node, lambda one: terms.square_of(one) is not None)
    length = terms.square_of(parts.factors[0]) if len(parts.factors) == 1 and not parts.divisors else None
    square = None if length is None else _squared_length(length)
    return None if square is None else _times(square, parts.scale)


def _squared_length(node: fx.Node) -> MeanSquare | None:
    """The square of a row's length, or of the root of a mean of squares; with a factor."""
    parts = terms.product(node)
    if len(parts.factors) != 1 or parts.divisors or parts.scale <= 0:
        return None
    inner = _unexpanded(parts.factors[0])
    found, under = terms.length_of(inner), terms.root_of(inner)
    square = None if found is None else MeanSquare(found.of, found.dims, found.times)
    square = _mean_square(under) if under is not None else square
    return None if square is None else _times(square, parts.scale * parts.scale)


def _times(square: MeanSquare, by: float) -> MeanSquare | None:
    if square.times is None:
        return square
    return replace(square, times=square.times * by) if square.times * by > 0 else None


def _epsilon_unknown(root: Root) -> Unlike | None:
    """Why a root of a mean of squares and of something that is no number is left alone; None where it is no such root."""
    total = terms.core(root.under)
    for term, other in (total.args[:2], total.args[1::-1]) if terms.calls(total, _aten.add.Tensor) else ():
        if isinstance(term, fx.Node) and terms.tensor(term) is not None and _mean_square(term) is not None:
            reason = f"epsilon is {other}, which is no number when the graph is compiled"
            lines = "torch.compile(..., dynamic=None)   # epsilon stays a number"
            return Unlike(terms.core(root.node), reason, lines=lines)
    return None
