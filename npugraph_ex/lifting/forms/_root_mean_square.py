"""Reads the divisor of a norm: the root mean square of each row, by squares or by the row's length, and where its epsilon is.

::

    sqrt(mean(x^2) + epsilon)          what a norm divides by; mean(x^2) may be a sum, or a length's square, divided by the size
    length(x) / sqrt(size)             the same without epsilon
    sqrt(mean(x^2)) + epsilon          another function, as is
    max(sqrt(mean(x^2)), epsilon)      but where no row is near epsilon

Where no operators tell, as where a product of matrices adds up the squares, the values do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import fx

from npugraph_ex.graph.metadata import same_numbers
from npugraph_ex.lifting import reductions, terms
from npugraph_ex.lifting.forms._row_functions import read_alone, row_function
from npugraph_ex.lifting.powers import Power, power
from npugraph_ex.lifting.proposal import Unlike

_aten = torch.ops.aten
_INVERSE_ROOT = -0.5
_ANOTHER = "a row is multiplied by another function of the mean of its squares than one divided by the root"
ADDED_UP = "the squares are added up, and not divided by how many they are"


@dataclass(frozen=True)
class Root:
    """A factor ``scale / sqrt(under)``, and the node in the product that is it, or one divided by it."""

    node: fx.Node
    under: fx.Node
    scale: float = 1.0


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
    for node, found in _powers(factors):
        if found.exponent == _INVERSE_ROOT and found.scale > 0:
            yield Root(node, found.base, found.scale)


def _powers(factors: terms.Product) -> Iterator[tuple[fx.Node, Power]]:
    """Each factor, and each divisor, and what power it is in the product."""
    for node in factors.factors:
        yield node, power(node, _unexpanded)
    for node in factors.divisors:
        found = power(node, _unexpanded).to(-1.0)
        if found is not None:
            yield node, found


def row_divisors(factors: terms.Product) -> Iterator[RowDivisor | Unlike]:
    """What looks like the root mean square of a row among the factors, the likest first; else what its values say it is."""
    read = list(_by_operators(factors))
    yield from read or _by_values(factors)


def _by_operators(factors: terms.Product) -> Iterator[RowDivisor | Unlike]:
    for root in roots(factors):
        found = root_mean_square(root)
        if found is not None:
            yield found
    for node, inverse in _powers(factors):
        if inverse.exponent != -1.0:
            continue
        added, bound = terms.plus_number(inverse.base), terms.at_least(inverse.base)
        length, epsilon = added or bound or (inverse.base, 0.0)
        whole, bounded = _squared_length(length), bound is not None and epsilon > 0
        if whole is not None and _holds(factors, whole.x):
            square = _times(whole, inverse.scale**-2) or whole
            epsilon = max(epsilon / inverse.scale, 0.0)
            yield RowDivisor(node, square, epsilon, outside=added is not None, least=bounded)


def _by_values(factors: terms.Product) -> Iterator[RowDivisor | Unlike]:
    """What each row is multiplied by, or divided by, where no operators tell."""
    numbers = [(one, False) for one in factors.factors] + [(one, True) for one in factors.divisors]
    for node, divides in numbers:
        number = _unexpanded(node)
        for x in read_alone(number):
            found = row_function(number, x, divides=divides) if _holds(factors, x) else None
            if found is None:
                continue
            if found.kind in {"under", "outside", "least"}:
                square = MeanSquare(x, (x.meta["val"].dim() - 1,), found.times)
                yield RowDivisor(node, square, found.epsilon, found.kind == "outside", found.kind == "least")
            else:
                yield Unlike(terms.core(node), f"{_ANOTHER}: {found.kind}")
            break


def _holds(factors: terms.Product, x: fx.Node) -> bool:
    """Whether all factors of ``x`` are there: programs divide other things by its length, too."""
    there = [terms.row_core(one) for one in factors.factors]
    return all(terms.row_core(one) in there for one in terms.product(x).factors)


def root_mean_square(root: Root) -> RowDivisor | Unlike | None:
    """A root of squares; None where it is of something else."""
    added, bound = terms.plus_number(root.under), terms.at_least(root.under)
    under, epsilon = added or bound or (root.under, 0.0)
    whole = _mean_square(under)
    if whole is None:
        return _epsilon_unknown(root)
    by = root.scale**-2
    square, epsilon = _times(whole, by) or whole, epsilon * by
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
    found = reductions.mean(node)
    if found is not None:
        x = terms.square_of(found.of)
        return None if x is None else _times(MeanSquare(x, found.dims, found.times), 1.0)
    parts = terms.product(node, lambda one: terms.square_of(one) is not None)
    if len(parts.factors) != 1 or parts.divisors:
        return None
    length = terms.square_of(parts.factors[0])
    square = None if length is None else _squared_length(length)
    return None if square is None else _times(square, parts.scale)


def _squared_length(node: fx.Node) -> MeanSquare | None:
    """The square of a row's length, or of the root of a mean of squares; with a factor."""
    root = power(node, _unexpanded)
    if root.scale <= 0 or root.exponent not in {1.0, -_INVERSE_ROOT}:
        return None
    found = reductions.length_of(root.base) if root.exponent == 1.0 else None
    square = None if found is None else MeanSquare(found.of, found.dims, found.times)
    square = _mean_square(root.base) if root.exponent != 1.0 else square
    return None if square is None else _times(square, root.scale * root.scale)


def _times(square: MeanSquare, by: float) -> MeanSquare | None:
    if square.times is None:
        return square
    return replace(square, times=square.times * by) if square.times * by > 0 else None


def _epsilon_unknown(root: Root) -> Unlike | None:
    """Why a root of a mean of squares and of something that is no number is left alone; None where it is no such root."""
    total = terms.core(root.under)
    for term, other in (total.args[:2], total.args[1::-1]) if terms.calls(total, _aten.add.Tensor) else ():
        if isinstance(term, fx.Node) and terms.tensor(term) is not None and _mean_square(term) is not None:
            if not isinstance(other, fx.Node) or not terms.is_symbol(other):
                return Unlike(terms.core(root.node), f"epsilon is the tensor {other}, and the operator takes a number")
            lines = "torch.compile(..., dynamic=None)   # epsilon stays a number"
            return Unlike(terms.core(root.node), f"epsilon {terms.IS_A_SYMBOL}", lines=lines)
    return None
