"""The product with a weight of int8 that is scaled to floating point on the way => `npu_weight_quant_batchmatmul`.

::

    y = x @ (w * scale) + bias       w int8, a scale for each column or one for all

The operator multiplies the weight by the scale, so a product that is scaled behind, ``(x @ w) * scale``, is another one: where
a scale is infinite and a weight 0, the operator gives NaN. A near-miss has the lines that scale the weight. It takes x, scale
and result in float16 or bfloat16, and a bias in float16 or, for bfloat16, float32 (CANN operator documentation,
aclnnWeightQuantBatchMatmulV2). The weight is read as int8 and never written in floating point.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from npugraph_ex.lifting import terms
from npugraph_ex.lifting.forms.quant_matmul import (
    LARGEST,
    MATRIX,
    RESHAPES,
    TAKEN,
    TRANSPOSED,
    Scaled,
    flat,
    int8_of,
    vector,
    with_bias,
)
from npugraph_ex.lifting.proposal import Build, Change, Emit, Proposal, Unlike

_aten = torch.ops.aten
_CAST = _aten._to_copy.default  # noqa: SLF001 - the operator's name
_PRODUCTS = (_aten.mm.default, _aten.matmul.default, _aten.addmm.default)


@dataclass(frozen=True)
class _Weighted:
    """``x @ weight``, with ``weight`` as it lies in memory or ``transposed``; scale and bias that are part of it, if any."""

    node: fx.Node
    x: fx.Node
    weight: fx.Node
    transposed: bool
    scale: fx.Node | None
    bias: fx.Node | None = None


def _weighted(node: fx.Node) -> _Weighted | None:
    """The product with a scaled int8 weight that ``node`` is a cast or a reshape of."""
    found = _multiplied(node)
    return None if found is None or found.scale is None else found


def _unscaled(node: fx.Node) -> _Weighted | None:
    """The product with an int8 weight that is a weight as it is."""
    found = _multiplied(node)
    plain = found is not None and found.scale is None and int8_of(found.x) is None
    return found if plain else None


def _multiplied(node: fx.Node) -> _Weighted | None:
    """The product with an int8 weight, scaled or as it is, that ``node`` is a cast or a reshape of."""
    inner = terms.core(node)
    while terms.calls(inner, *RESHAPES):
        inner = terms.core(inner.args[0])  # type: ignore[arg-type]
    if not terms.calls(inner, *_PRODUCTS) or inner.kwargs:
        return None
    *bias, x, operand = inner.args
    if not isinstance(x, fx.Node) or not isinstance(operand, fx.Node) or x.meta["val"].dtype not in TAKEN:
        return None
    source, transposed = _before_turns(operand)
    if source.meta["val"].dim() != MATRIX:
        return None
    parts = terms.product(source)
    whole = [one for one in parts.factors if int8_of(one) is not None]
    scales = [one for one in parts.factors if one not in whole]
    if len(whole) != 1 or len(scales) > 1 or parts.divisors or parts.scale != 1:
        return None
    weight, turned = int8_of(whole[0])  # type: ignore[misc]
    if not all(_is_of_columns(one, source, 0 if transposed else 1) for one in scales):
        return None
    return _Weighted(inner, x, weight, turned != transposed, scales[0] if scales else None, *bias)  # type: ignore[arg-type]


def _scaled_behind(node: fx.Node, value: torch.Tensor) -> Unlike | None:
    """Why a product with an int8 weight stays that is scaled behind it, with the lines that scale the weight."""
    found = with_bias(node, value.shape[-1], _unscaled)
    if found is None or found[0].number != 1 or len(found[0].factors) != 1 or terms.calls(node, _aten.add.Tensor):
        return None  # the product before a bias was asked
    product, scale = found[0].sum, found[0].factors[0]
    if vector(scale, value.shape[-1]) is None:
        return None
    if product.bias is not None:
        return Unlike(product.node, "product and bias are scaled together, and not the weight, as the operator does")
    turned = product.transposed

    def program(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        wide = weight.to(x.dtype) * scale.to(x.dtype).reshape((-1, 1) if turned else (1, -1))
        return (x @ (wide.t() if turned else wide)).to(value.dtype)

    lines = "y = x @ (weight.to(x.dtype) * scale.reshape(1, -1))"
    if turned:
        lines = "y = torch.nn.functional.linear(x, weight.to(x.dtype) * scale.reshape(-1, 1))"
    mend = "scale the weight, if an infinite scale may give NaN where the weight is 0"
    change = Change(
        Proposal((product.x, product.weight, scale), (node,), ()), "the scaled weight", program, mend, lines
    )
    return Unlike(product.node, "the product is scaled, and not the weight, as the operator does", change)


def _scaled_again(node: fx.Node, found: Scaled[_Weighted]) -> Unlike | None:
    """Why a scale stays that stands behind the product, too, where it could be part of the weight's."""
    if terms.calls(node, _aten.add.Tensor):
        return None  # the product before a bias is asked
    if not all(vector(one, node.meta["val"].shape[-1]) for one in found.factors):
        return None
    return Unlike(
        node,
        "the weight is scaled, and the product again; the operator takes one scale: multiply the two once, a bias by the second",
    )


def _other_weight(node: fx.Node, value: torch.Tensor) -> Unlike | None:
    """Why a product with a weight that is computed from int8 stays; None where it is none, or is told with what scales it."""
    if not terms.calls(node, *_PRODUCTS) or node.kwargs:
        return None
    source = list(terms.reshaped_from(_before_turns(node.args[-1])[0]))[-1]  # type: ignore[arg-type]
    parts = terms.product(source)
    whole = [one for one in parts.factors if any(map(int8_of, terms.reshaped_from(one)))]
    moved = [one for one in parts.factors if one not in whole and _is_moved(one)]
    scales = [one for one in (*parts.factors, *parts.divisors) if one not in (*whole, *moved)]
    if len(whole) + len(moved) != 1 or not (scales or moved):
        return None
    if moved:
        reason = (
            "the weight is moved before it is scaled, as by a zero point; the form has a weight that is scaled alone"
        )
    elif value.dtype not in TAKEN:
        reason = f"the product is {value.dtype}; the operator takes 16 bits"
    else:
        shown = " and ".join(f"{one.name} {list(one.meta['val'].shape)}" for one in scales)
        reason = f"the weight is scaled by {shown}; the operator takes one factor, with a number for each column"
    return Unlike(node, reason)


def _is_moved(node: fx.Node) -> bool:
    """Whether something is added to an int8 tensor, or subtracted from it."""
    inner = terms.core(node)
    return terms.calls(inner, *terms.ADDING) and any(
        isinstance(operand, fx.Node) and any(map(int8_of, terms.reshaped_from(operand))) for operand in inner.args[:2]
    )


def _before_turns(operand: fx.Node) -> tuple[fx.Node, bool]:
    """What an operand is a cast or a transposed view of, and whether it is transposed."""
    source, transposed = terms.core(operand), False
    while terms.calls(source, *TRANSPOSED):
        source, transposed = terms.core(source.args[0]), not transposed  # type: ignore[arg-type]
    return source, transposed


def _is_of_columns(scale: fx.Node, weight: fx.Node, dim: int) -> bool:
    """Whether there is one scale for each index of a dimension, or one for all."""
    value, size = scale.meta["val"], weight.meta["val"].shape[dim]
    if value.numel() == 1:
        return True
    behind = value.shape[value.dim() - MATRIX + dim] if value.dim() + dim >= MATRIX else 1
    return terms.same_size(behind, size) and terms.same_size(value.numel(), size)


class _WeightQuant:
    """The form."""

    name = "lift_weight_quant"
    ends_with = frozenset({_CAST, _aten.add.Tensor, *terms.MULTIPLYING, *_PRODUCTS})

    def read(self, node: fx.Node) -> Proposal | Unlike | None:
        """The product that is ``node``."""
        value = terms.tensor(node)
        if value is None or value.dim() < MATRIX:
            return None
        found = with_bias(node, value.shape[-1], _weighted) if value.dtype in TAKEN else None
        if found is None:
            return (_scaled_behind(node, value) if value.dtype in TAKEN else None) or _other_weight(node, value)
        product, added = found[0].sum, found[1]
        if found[0].number != 1 or found[0].factors:
            return _scaled_again(node, found[0])
        if product.scale is None or (product.bias is not None and added is not None):
            return None
        return self._of(node, product, product.scale, added if product.bias is None else product.bias)

    def _of(self, node: fx.Node, product: _Weighted, scale: fx.Node, bias: fx.Node | None) -> Proposal | Unlike:
        value, x, weight = node.meta["val"], product.x.meta["val"], product.weight.meta["val"]
        sizes = (x.shape[-1], value.shape[-1])
        if x.dtype != value.dtype or not all(isinstance(size, int) and size <= LARGEST for size in sizes):
            return Unlike(
                product.node, f"x is {x.dtype}, the result {value.dtype}, and the weight {list(weight.shape)}"
            )
        if bias is not None and not terms.same_size(bias.meta["val"].numel(), sizes[1]):
            return Unlike(product.node, f"the bias is {list(bias.meta['val'].shape)}")
        shape = [size if isinstance(size, int) else -1 for size in value.shape]
        if shape.count(-1) > 1:
            return Unlike(product.node, "several sizes of the result are symbols")
        scale = terms.of_dtype(scale, value.dtype) or scale
        operands = (product.x, product.weight, scale, *([] if bias is None else [bias]))
        return Proposal(operands, (node,), (_build(shape, transposed=product.transposed),), sums_rows=True)


def _build(shape: list[int], *, transposed: bool) -> Build:
    def build(emit: Emit, x: fx.Node, weight: fx.Node, scale: fx.Node, *bias: fx.Node) -> tuple[fx.Node, ...]:
        dtype = x.meta["val"].dtype
        wide = torch.float32 if dtype == torch.bfloat16 else dtype
        rows = x if x.meta["val"].dim() == MATRIX else emit(_aten.view.default, x, [-1, x.meta["val"].shape[-1]])
        made = emit(
            torch.ops.npu.npu_weight_quant_batchmatmul.default,
            rows,
            emit(_aten.t.default, weight) if transposed else weight,
            _cast(emit, flat(emit, scale), dtype),
            bias=_cast(emit, flat(emit, bias[0]), wide) if bias else None,
        )
        return (made if len(shape) == MATRIX else emit(_aten.view.default, made, shape),)

    return build


def _cast(emit: Emit, node: fx.Node, dtype: Any) -> fx.Node:
    return node if node.meta["val"].dtype == dtype else emit(_CAST, node, dtype=dtype)


FORM = _WeightQuant()
