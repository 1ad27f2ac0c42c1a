"""Reads reductions, however the program spells them: means and sums, by pools and products with ones, too; the largest of a row."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, replace

import torch
from torch import fx
from torch._ops import OpOverload

from npugraph_ex.graph.metadata import same_numbers
from npugraph_ex.lifting import terms

_aten = torch.ops.aten

_BY_A_COLUMN = (_aten.matmul.default, _aten.mm.default, _aten.mv.default, _aten.dot.default)
_POOLS = (_aten.avg_pool2d.default, _aten._adaptive_avg_pool2d.default)  # noqa: SLF001 - the operator's name
_ROUNDED = 2.0**-23
"""How far a float32 number may be from the one that a program writes."""


@dataclass(frozen=True)
class Mean:
    """``times`` the mean of ``of`` over ``dims``, counted from 0; ``times`` is None where a sum adds an unknown number."""

    of: fx.Node
    dims: tuple[int, ...]
    times: float | None = 1.0

    @property
    def complete(self) -> bool:
        """Whether a sum is divided by as many as it adds."""
        return terms.same_number(self.times, 1.0)


def mean(node: fx.Node) -> Mean | None:
    """``node`` as a mean or a sum, with a factor; None where it is neither, or changes the order of elements."""
    node = terms.core(node)
    pooled = _pooled(node)
    if pooled is not None or terms.calls(node, *terms.RESHAPES):
        return pooled or _kept(node)
    if terms.calls(node, _aten.mean.dim, _aten.mean.default):
        return _reduced(node, scale=None)
    if terms.calls(node, _aten.sum.dim_IntList, _aten.sum.default):
        return _reduced(node, scale=1.0)
    if terms.calls(node, *_BY_A_COLUMN):
        return _by_a_column(node)
    parts = terms.product(node)
    if len(parts.factors) != 1 or parts.divisors or terms.core(parts.factors[0]) is node:
        return None
    found = mean(parts.factors[0])
    return found and replace(found, times=None if found.times is None else found.times * parts.scale)


def length_of(node: fx.Node) -> Mean | None:
    """``node`` as a root of a sum of squares, by `linalg_vector_norm`: what of, over which dimensions, and of how many squares."""
    node = terms.core(node)
    given = terms.arguments(node) if terms.calls(node, _aten.linalg_vector_norm.default) else {}
    if given.get("ord", 2) != 2 or not given:
        return None
    return _reduced(node, scale=1.0)


def over_one_dimension(node: fx.Node, *operators: OpOverload) -> tuple[fx.Node, int] | None:
    """``(x, dim)`` where one of ``operators`` reduces x over one dimension, counted from 0, that is kept, or put back behind it."""
    inner, put_back = terms.core(node), None
    if terms.calls(inner, _aten.unsqueeze.default):
        put_back, inner = inner.args[1] % inner.meta["val"].dim(), terms.core(inner.args[0])  # type: ignore[arg-type]
    if inner.target is operator.getitem and inner.args[1] == 0 and terms.calls(inner.args[0], _aten.max.dim):
        inner = inner.args[0]
    if not terms.calls(inner, *operators):
        return None
    given = terms.arguments(inner)
    x, dims = given["self"], given.get("dim") or ()
    dims = [dims] if isinstance(given.get("dim"), int) else [*dims]
    positions = [dim % x.meta["val"].dim() for dim in dims]
    wanted = positions if not given.get("keepdim", False) else [None]
    return (x, positions[0]) if len(positions) == 1 and wanted == [put_back] else None


def _kept(node: fx.Node) -> Mean | None:
    """A mean that lost its dimension and gets it back: ``mean(-1).unsqueeze(-1)``."""
    source = next(one for one in terms.reshaped_from(node) if not terms.calls(terms.core(one), *terms.RESHAPES))
    found, new, old = mean(source), terms.tensor(node), terms.tensor(source)
    if found is None or new is None or old is None:
        return None
    return found if same_numbers(new.shape, (*old.shape, 1)) or same_numbers(new.shape, old.shape) else None


def _by_a_column(node: fx.Node) -> Mean | None:
    """A product with a column of equal numbers, or as many as it adds up; they may be float32 ones that were rounded."""
    rows, column = node.args[:2]
    size, number = terms.tensor(column).shape, terms.constant(column)  # type: ignore[union-attr]
    if number is None or not isinstance(size[0], int) or not size[0] or [*size[1:]] not in ([], [1], [size[0]]):
        return None
    times = number * size[0]
    return Mean(rows, (terms.tensor(rows).dim() - 1,), 1.0 if math.isclose(times, 1.0, rel_tol=_ROUNDED) else times)  # type: ignore[union-attr,arg-type]


def _pooled(node: fx.Node) -> Mean | None:
    """The mean of each row by a window over all of it, as `avg_pool1d` has it: a pool of images one element high."""
    pool = next((one for one in terms.reshaped_from(node) if terms.calls(one, *_POOLS)), None)
    if pool is None:
        return None
    given, image = terms.arguments(pool), terms.core(pool.args[0])  # type: ignore[arg-type]
    high, wide = terms.tensor(image).shape[-2:]  # type: ignore[union-attr]
    window, wanted = (given["kernel_size"], (high, wide)) if "kernel_size" in given else (given["output_size"], (1, 1))
    whole = same_numbers(window, wanted)
    changed = given.get("divisor_override") or any(given.get("padding", ()))
    rows = image.args[0] if terms.calls(image, _aten.unsqueeze.default) else image
    lead, numbers = (
        [size for size in shape if not terms.same_size(size, 1)]
        for shape in (terms.tensor(rows).shape[:-1], terms.tensor(node).shape)  # type: ignore[union-attr]
    )
    if not whole or changed or not terms.same_size(high, 1) or not same_numbers(lead, numbers):
        return None
    return Mean(rows, (terms.tensor(rows).dim() - 1,))  # type: ignore[union-attr,arg-type]


def _reduced(node: fx.Node, scale: float | None) -> Mean | None:
    """A reduction; ``scale`` is None for one that divides by itself."""
    given = terms.arguments(node)
    source = given["self"]
    value = terms.tensor(source)
    if value is None:
        return None
    dims = given.get("dim")
    dims = range(value.dim()) if dims is None else [dims] if isinstance(dims, int) else dims
    positions = tuple(sorted({dim % max(value.dim(), 1) for dim in dims}))
    if scale is None:
        return Mean(source, positions)
    size = math.prod(value.shape[dim] for dim in positions)
    return Mean(source, positions, scale * size if isinstance(size, int) else None)
