"""The product of quantised numbers, scaled by token and by column => `npu_quant_matmul`.

::

    y = (q @ w) * token_scale * column_scale + bias       in float16 or bfloat16; q and w int8, with or without a bias

The product may be `_int_mm`, or one of q and w cast to int32 or to floating point. Token scales are [..., 1], column scales a
vector or one number, both float32 (CANN operator documentation, aclnnQuantMatmulV5). The operator adds up whole numbers exactly,
and rounds once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch import fx

from npugraph_ex.lifting import terms
from npugraph_ex.lifting.proposal import Build, Emit, Proposal, Unlike

_aten = torch.ops.aten
_CAST = _aten._to_copy.default  # noqa: SLF001 - the operator's name
_INT_MM = _aten._int_mm.default  # noqa: SLF001 - the operator's name
_OUT_DTYPE: Any = torch.ops.higher_order.out_dtype
_PRODUCTS = (_INT_MM, _aten.mm.default, _aten.matmul.default, _aten.linear.default)
RESHAPES = (_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default)  # noqa: SLF001 - its name
TRANSPOSED = (_aten.t.default, _aten.transpose.int, _aten.permute.default)
TAKEN = (torch.float16, torch.bfloat16)
MATRIX = 2
LARGEST = 65535
"""Of the inner dimensions of both matrices."""


@dataclass(frozen=True)
class _Sum:
    """The product of two int8 tensors: ``node`` is ``x @ w``, with ``w`` as it lies in memory or ``transposed``."""

    node: fx.Node
    x: fx.Node
    weight: fx.Node
    transposed: bool


_Product = TypeVar("_Product")
SumOf = Callable[[fx.Node], "_Product | None"]
"""Reads the matrix product that a node is a cast or a reshape of."""


@dataclass(frozen=True)
class Scaled(Generic[_Product]):
    """A sum times these factors and this number."""

    sum: _Product
    factors: tuple[fx.Node, ...] = ()
    number: float = 1.0


def _before_casts(node: object) -> fx.Node | None:
    """What ``node`` is a copy or a cast of, between any dtypes that hold the whole numbers of int8."""
    while isinstance(node, fx.Node):
        inner = terms.core(node)
        source = terms.tensor(inner.args[0]) if terms.calls(inner, _CAST, _aten.clone.default) else None
        value = terms.tensor(inner)
        if source is None or value is None or source.device != value.device:
            return inner
        if not (value.is_floating_point() or value.dtype == torch.int32):
            return inner
        node = inner.args[0]
    return None


def int8_of(node: object) -> tuple[fx.Node, bool] | None:
    """The int8 tensor that ``node`` is a cast of, and whether it is transposed."""
    found, transposed = _before_casts(node), False
    # A transposed view that is int8 itself is an operand as it is.
    while terms.calls(found, *TRANSPOSED) and found.meta["val"].dim() == MATRIX and not _is_int8(found):
        if found.target is _aten.permute.default and list(found.args[1]) == [0, 1]:  # type: ignore[arg-type]
            break
        found, transposed = _before_casts(found.args[0]), not transposed
    return (found, transposed) if found is not None and _is_int8(found) else None


def _is_int8(node: fx.Node) -> bool:
    value = terms.tensor(node)
    return value is not None and value.dtype == torch.int8


def _sum_of(node: fx.Node) -> _Sum | None:
    """The sum of products that ``node`` is a cast or a reshape of."""
    while True:
        inner = _before_casts(node)
        if inner is None or not terms.calls(inner, *RESHAPES):
            break
        node = inner.args[0]  # type: ignore[assignment]
    if not terms.calls(inner, *_PRODUCTS, _OUT_DTYPE) or inner.kwargs:
        return None
    given = inner.args
    if inner.target is _OUT_DTYPE:
        given = given[2:] if given[:2] == (_aten.mm.default, torch.int32) else ()
    if len(given) != MATRIX:
        return None
    x, weight = map(int8_of, given)
    if x is None or weight is None or x[1] or _is_int8(inner):
        return None
    return _Sum(inner, x[0], weight[0], weight[1] != (inner.target is _aten.linear.default))


def _scaled(node: fx.Node, size: Any, sum_of: SumOf[_Product], depth: int = 4) -> Scaled[_Product] | None:
    """``node`` as a sum times factors; reshapes in between keep the last dimension."""
    value = terms.tensor(node)
    if value is None or not depth or not value.dim() or not terms.same_size(value.shape[-1], size):
        return None
    found = sum_of(node)
    if found is not None:
        return Scaled(found)
    inner = terms.core(node)
    if terms.calls(inner, *RESHAPES):
        return _scaled(inner.args[0], size, sum_of, depth - 1)  # type: ignore[arg-type]
    parts = terms.product(inner)
    if parts.divisors or [terms.core(one) for one in parts.factors] == [inner]:
        return None
    for at, factor in enumerate(parts.factors):
        under = _scaled(factor, size, sum_of, depth - 1)
        if under is not None:
            others = tuple(map(_unexpanded, (*parts.factors[:at], *parts.factors[at + 1 :])))
            return replace(under, factors=under.factors + others, number=under.number * parts.scale)
    return None


def _unexpanded(node: fx.Node) -> fx.Node:
    """The node before it was repeated for all columns."""
    inner = terms.core(node)
    source = terms.tensor(inner.args[0]) if terms.calls(inner, _aten.expand.default) else None
    rows = source is not None and source.dim() == node.meta["val"].dim() and terms.same_size(source.shape[-1], 1)
    return inner.args[0] if rows else node  # type: ignore[return-value]


def with_bias(node: fx.Node, size: Any, sum_of: SumOf[_Product]) -> tuple[Scaled[_Product], fx.Node | None] | None:
    """``node`` as a scaled sum, and the bias that is added to it."""
    inner = terms.core(node)
    while terms.calls(inner, *RESHAPES):
        inner = terms.core(inner.args[0])  # type: ignore[arg-type]
    if not terms.calls(inner, _aten.add.Tensor) or inner.kwargs:
        found = _scaled(node, size, sum_of)
        return None if found is None else (found, None)
    for one, other in (inner.args, inner.args[::-1]):
        found = _scaled(one, size, sum_of) if isinstance(one, fx.Node) and vector(other, size) else None
        if found is not None:
            return found, other  # type: ignore[return-value]
    return None


class _QuantMatmul:
    """The form."""

    name = "lift_quant_matmul"
    ends_with = frozenset({_CAST, _aten.mul.Tensor, _aten.add.Tensor})

    def read(self, node: fx.Node) -> Proposal | Unlike | None:
        """The scaled product that is ``node``."""
        value = terms.tensor(node)
        if value is None or value.dtype not in TAKEN or not value.dim():
            return None
        found = with_bias(node, value.shape[-1], _sum_of)
        return None if found is None or not found[0].factors else self._of(node, *found)

    def _of(self, node: fx.Node, scaled: Scaled[_Sum], bias: fx.Node | None) -> Proposal | Unlike:
        total, value = scaled.sum, node.meta["val"]
        sizes = (*total.x.meta["val"].shape[-1:], *value.shape[-1:])
        weight = total.weight.meta["val"]
        if weight.dim() != MATRIX or not all(isinstance(size, int) and size <= LARGEST for size in sizes):
            return Unlike(
                total.node,
                f"the weight is {list(weight.shape)}; the operator takes up to {LARGEST} known rows and columns",
            )
        if scaled.number != 1:
            return Unlike(total.node, f"the product is multiplied by the number {scaled.number:g}, too")
        tokens = [one for one in scaled.factors if _of_tokens(one, value)]
        columns = [one for one in scaled.factors if one not in tokens]
        if len(tokens) != 1 or len(columns) != 1 or vector(columns[0], sizes[1]) is None:
            shown = " and ".join(f"{one.name} {list(one.meta['val'].shape)}" for one in scaled.factors)
            return Unlike(total.node, f"the scales are {shown}; the operator takes one of tokens and one of columns")
        # Not what the token scale is a cast of: the whole numbers may be those of the scale as it was rounded.
        token, column = tokens[0], terms.of_dtype(columns[0], torch.float32) or columns[0]
        operands = [token, total.x, total.weight, column]
        added = None
        if bias is not None:
            taken = {value.dtype, torch.float32}
            added = next((one for one in reversed(list(terms.casts(bias))) if one.meta["val"].dtype in taken), None)
            shown = bias.meta["val"]
            if added is None or shown.numel() != sizes[1]:
                return Unlike(
                    total.node,
                    f"the bias is {shown.dtype}{list(shown.shape)}; the operator takes a vector of {sizes[1]}",
                )
            operands.append(added)
        shape = [size if isinstance(size, int) else -1 for size in value.shape]
        if shape.count(-1) > 1:
            return Unlike(total.node, "several sizes of the result are symbols")
        build = _build(value.dtype, shape, transposed=total.transposed)
        return Proposal(tuple(operands), (node,), (build,), sums_rows=added is not None)


def _of_tokens(node: fx.Node, like: torch.Tensor) -> bool:
    """Whether ``node`` has a number for each row of ``like``."""
    value = terms.tensor(node)
    if value is None or value.dim() < MATRIX or not terms.same_size(value.shape[-1], 1):
        return False
    return terms.same_size(value.numel(), math.prod(like.shape[:-1]))


def vector(node: Any, size: Any) -> fx.Node | None:
    """The node where it has one number for each column, or one for all."""
    value = terms.tensor(node)
    if value is None or not value.is_floating_point():
        return None
    alone = all(terms.same_size(one, 1) for one in value.shape[:-1])
    fits = not value.dim() or terms.same_size(value.shape[-1], 1) or terms.same_size(value.shape[-1], size)
    return node if alone and fits else None


def _build(dtype: torch.dtype, shape: list[int], *, transposed: bool) -> Build:
    def build(
        emit: Emit, token: fx.Node, x: fx.Node, weight: fx.Node, column: fx.Node, *bias: fx.Node
    ) -> tuple[fx.Node, ...]:
        token, column = (
            one if one.meta["val"].dtype == torch.float32 else emit(_CAST, one, dtype=torch.float32)
            for one in (token, column)
        )
        rows = x if x.meta["val"].dim() == MATRIX else emit(_aten.view.default, x, [-1, x.meta["val"].shape[-1]])
        made = emit(
            torch.ops.npu.npu_quant_matmul.default,
            rows,
            emit(_aten.t.default, weight) if transposed else weight,
            flat(emit, column),
            pertoken_scale=flat(emit, token),
            bias=flat(emit, bias[0]) if bias else None,
            output_dtype=dtype,
        )
        return (made if len(shape) == MATRIX else emit(_aten.view.default, made, shape),)

    return build


def flat(emit: Emit, node: fx.Node) -> fx.Node:
    """The node as a vector."""
    return node if node.meta["val"].dim() == 1 else emit(_aten.view.default, node, [-1])


FORM = _QuantMatmul()
