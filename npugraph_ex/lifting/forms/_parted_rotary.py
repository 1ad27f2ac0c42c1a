"""A rotary embedding that is written part by part, with tables of half the width, as GPT-OSS, GPT-J and vLLM have it.

::

    a, b = the halves, or the even and the odd elements, of the last dimension
    y = cat(a * cos - b * sin, b * cos + a * sin)         or stacked, as pairs
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from npugraph_ex.graph.metadata import same_numbers
from npugraph_ex.lifting import terms

_aten = torch.ops.aten
_Where = tuple[int, int, int]


@dataclass(frozen=True)
class PartedRotary:
    """``first * cosine - second * sine``, then ``second * cosine + first * sine``.

    ``first`` and ``second`` say where these parts lie in the last dimension of ``x``; ``total`` is the difference.
    """

    total: fx.Node
    x: fx.Node
    first: _Where
    second: _Where
    cosine: fx.Node
    sine: fx.Node
    stacked: bool


def parted_rotary(node: fx.Node) -> PartedRotary | None:
    """The embedding whose parts ``node`` joins; None where it joins something else."""
    inner, value = terms.core(node), terms.tensor(node)
    stack = next((one for one in terms.reshaped_from(node) if terms.calls(one, _aten.stack.default)), None)
    joint = inner if terms.calls(inner, _aten.cat.default) else stack
    whole = terms.tensor(joint)
    if joint is None or value is None or whole is None:
        return None
    given = terms.arguments(joint)
    if len(given["tensors"]) != 2 or given.get("dim", 0) % whole.dim() != whole.dim() - 1:
        return None
    difference, total = map(terms.core, given["tensors"])
    if not terms.calls(difference, _aten.sub.Tensor) or not terms.calls(total, _aten.add.Tensor):
        return None
    if difference.kwargs or total.kwargs:
        return None
    for first in _turned(difference.args[0]):
        for second in _turned(difference.args[1]):
            crossed = {(_of(second, first.table)), _of(first, second.table)}
            found = [{_of(one, one.table) for one in _turned(term)} for term in total.args]
            both = all(each & crossed for each in found) and crossed <= found[0] | found[1]
            shape = terms.tensor(first.x)
            alike = shape is not None and same_numbers(shape.shape, value.shape)
            if alike and both and terms.core(first.x) is terms.core(second.x):
                return PartedRotary(
                    difference, first.x, first.where, second.where, first.table, second.table, joint is stack
                )
    return None


@dataclass(frozen=True)
class _RotaryPart:
    """A part of ``x`` in a product with ``table``."""

    x: fx.Node
    where: _Where
    table: fx.Node


def _turned(term: object) -> Iterator[_RotaryPart]:
    """The ways to read a product as that of a part and a table: a table may be a part, too."""
    product = terms.core(term) if isinstance(term, fx.Node) else None
    if not terms.calls(product, _aten.mul.Tensor):
        return
    for one, table in (product.args, product.args[::-1]):
        part = terms.part_of(terms.core(one)) if isinstance(one, fx.Node) else None
        if part is not None and isinstance(table, fx.Node):
            yield _RotaryPart(part[0], part[1:], table)


def _of(part: _RotaryPart, table: fx.Node) -> tuple[fx.Node, _Where, fx.Node]:
    """What of x, times which table: equal for equal products."""
    return terms.core(part.x), part.where, terms.core(table)
