"""A rotary embedding that is written part by part, with tables of half the width, as GPT-OSS, GPT-J and vLLM have it.

::

    a, b = the halves, or the even and the odd elements, of the last dimension
    y = cat(a * cos - b * sin, b * cos + a * sin)         or stacked, as pairs; or both are written to a new tensor

The second cosine and sine may be others, if tables of the whole width are cut as x is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import fx

from npugraph_ex.graph.metadata import same_numbers
from npugraph_ex.lifting import terms
from npugraph_ex.lifting.parts import part_of

_aten = torch.ops.aten
_Where = tuple[int, int, int]


@dataclass(frozen=True)
class RotaryTables:
    """Cosines and sines; ``doubled``: of half the width of x, or the elements ``cut`` of the last dimension are."""

    cosine: fx.Node
    sine: fx.Node
    doubled: bool = False
    cut: _Where | None = None

    def width(self, whole: int | torch.SymInt) -> int | torch.SymInt:
        """Of a table for all of x, if one is ``whole`` elements wide."""
        return (2 if self.doubled else 1) * (whole if self.cut is None else len(range(*self.cut)))


@dataclass(frozen=True)
class PartedRotary:
    """``first * cosine - second * sine``, then ``second * cosine + first * sine``.

    ``first`` and ``second`` say where these parts lie in the last dimension of ``x``; ``total`` is the difference.
    """

    total: fx.Node
    x: fx.Node
    first: _Where
    second: _Where
    tables: RotaryTables
    stacked: bool


@dataclass(frozen=True)
class RotaryTerm:
    """``sign`` times the product of two factors, as a term of a sum."""

    sign: float
    factors: tuple[fx.Node, fx.Node]

    def pairs(self) -> tuple[tuple[fx.Node, fx.Node], ...]:
        """The factors in either order."""
        return self.factors, self.factors[::-1]


def signed(node: fx.Node) -> tuple[float, fx.Node]:
    """``(-1, x)`` where ``node`` is ``-x``, in each way to write it; otherwise 1 and the node."""
    sign = 1.0
    while True:
        inner = terms.outermost(terms.core(node))
        if inner is None or inner.scale != -1.0 or len(inner.factors) != 1 or inner.divisors:
            return sign, node
        sign, node = -sign, inner.factors[0]


def rotary_terms(node: fx.Node) -> tuple[RotaryTerm, RotaryTerm] | None:
    """The two products whose sum, or difference, ``node`` is; None where it is something else."""
    found = terms.summands(node)
    if found is None:
        return None
    first, second = map(_term, found)
    return None if first is None or second is None else (first, second)


def _term(product: terms.Product) -> RotaryTerm | None:
    sign, factors = product.scale, product.factors
    if len(factors) == 1:
        own, node = signed(factors[0])
        inner = terms.outermost(terms.core(node))
        if inner is None or inner.divisors or inner.scale != 1.0:
            return None
        sign, factors = sign * own, inner.factors
    signs = [signed(factor) for factor in factors]
    if len(factors) != 2 or product.divisors or abs(sign) != 1.0:
        return None
    return RotaryTerm(sign * signs[0][0] * signs[1][0], (signs[0][1], signs[1][1]))


def parted_rotary(node: fx.Node) -> PartedRotary | None:
    """The embedding whose parts ``node`` joins; None where it joins something else."""
    joint, value = _joint(node) or _written(node), terms.tensor(node)
    if joint is None or value is None:
        return None
    difference, total = map(rotary_terms, joint.parts)
    if (
        difference is None
        or total is None
        or [sum(term.sign for term in one) for one in (difference, total)] != [0.0, 2.0]
    ):
        return None
    minuend = sorted(difference, key=lambda term: -term.sign)
    for first, second, *others in _parts(minuend, total):
        shape = terms.tensor(first.x)
        tables = _tables(first, second, *others)
        if tables is not None and shape is not None and same_numbers(shape.shape, value.shape):
            return PartedRotary(terms.core(joint.parts[0]), first.x, first.where, second.where, tables, joint.stacked)
    return None


@dataclass(frozen=True)
class _Joint:
    """Two parts of a last dimension: its halves, or ``stacked`` as pairs."""

    parts: tuple[fx.Node, ...]
    stacked: bool


def _joint(node: fx.Node) -> _Joint | None:
    """What a concatenation or a stack joins."""
    inner = terms.core(node)
    stack = next((one for one in terms.reshaped_from(node) if terms.calls(one, _aten.stack.default)), None)
    joint = inner if terms.calls(inner, _aten.cat.default) else stack
    whole = terms.tensor(joint)
    if joint is None or whole is None:
        return None
    given = terms.arguments(joint)
    behind = (
        whole.dim() - 1 - given.get("dim", 0) % whole.dim()
    )  # stacked in front of the last dimension, they are halves
    if len(given["tensors"]) != 2 or behind > (joint is stack):
        return None
    return _Joint(tuple(given["tensors"]), joint is stack and not behind)


def _written(node: fx.Node) -> _Joint | None:
    """What is written to the two parts of a new tensor, of which nothing else is left."""
    inner, value = terms.core(node), terms.tensor(node)
    size = value.shape[-1] if value is not None and value.dim() else None
    if not isinstance(size, int):
        return None
    writes: dict[_Where, fx.Node] = {}
    while terms.calls(inner, _aten.slice_scatter.default) and len(writes) < 2:
        given = terms.arguments(inner)
        bounds = given.get("start"), given.get("end"), given.get("step", 1)
        if not terms.is_last(given.get("dim", 0), inner) or any(isinstance(one, fx.Node) for one in bounds):
            return None  # a symbol bounds the place of a cache
        start, stop, step = slice(*bounds).indices(size)
        source = terms.core(given["src"])
        writes[start, stop, step] = source.args[1] if terms.calls(source, _aten.copy.default) else source  # type: ignore[assignment]
        inner = terms.core(given["self"])
    halves, pairs = ((0, size // 2, 1), (size // 2, size, 1)), ((0, size, 2), (1, size, 2))
    places = next((places for places in (halves, pairs) if {*writes} == {*places}), None)
    return None if places is None else _Joint(tuple(writes[where] for where in places), stacked=places is pairs)


@dataclass(frozen=True)
class _RotaryPart:
    """A part of ``x`` in a product with ``table``."""

    x: fx.Node
    where: _Where
    table: fx.Node

    def is_of(self, other: _RotaryPart) -> bool:
        """Whether both are parts of the same tensor."""
        return terms.core(self.x) is terms.core(other.x)

    def is_same(self, other: _RotaryPart) -> bool:
        """Whether both are the same part."""
        return self.where == other.where and self.is_of(other)


def _turned(term: RotaryTerm) -> Iterator[_RotaryPart]:
    """The ways to read a product as that of a part and a table: a table may be a part, too."""
    for one, table in term.pairs():
        part = part_of(terms.core(one))
        if part is not None:
            yield _RotaryPart(part[0], part[1:], table)


def _parts(difference: Sequence[RotaryTerm], total: Sequence[RotaryTerm]) -> Iterator[tuple[_RotaryPart, ...]]:
    """The parts of x in the terms of both, in the order of the formula: first, second, second, first."""
    for first, second in product(*map(_turned, difference)):
        for terms_of_total in (total, total[::-1]):
            for third, fourth in product(*map(_turned, terms_of_total)):
                if third.is_same(second) and fourth.is_same(first) and first.is_of(second):
                    yield first, second, third, fourth


def _tables(first: _RotaryPart, second: _RotaryPart, third: _RotaryPart, fourth: _RotaryPart) -> RotaryTables | None:
    """The cosines and sines that these parts are multiplied by."""
    if all(terms.core(one.table) is terms.core(other.table) for one, other in ((first, third), (second, fourth))):
        return RotaryTables(first.table, second.table, doubled=True)
    cosine, cosines, sine, sines = (part_of(terms.core(one.table)) for one in (first, third, second, fourth))
    if cosine is None or cosines is None or sine is None or sines is None:
        return None
    if any(terms.core(one[0]) is not terms.core(other[0]) for one, other in ((cosine, cosines), (sine, sines))):
        return None
    where = [one[1:] for one in (cosine, sine, cosines, sines)]
    if where == where[:1] * 4:  # the same part of the tables each time
        return RotaryTables(cosine[0], sine[0], doubled=True, cut=where[0])
    as_x = where == [first.where] * 2 + [second.where] * 2
    return RotaryTables(cosine[0], sine[0]) if as_x else None
