"""The product with a weight of int8 that is scaled to floating point on the way => `npu_weight_quant_batchmatmul`.

::

    y = x @ (w * scale) + bias       w int8, a scale for each column or one for all

The operator multiplies the weight by the scale, so a product that is scaled behind, ``(x @ w) * scale``, is another one: where a
scale is infinite and a weight 0, the operator gives NaN. It takes x, scale and result in float16 or bfloat16, and a bias in
float16 or, for bfloat16, float32 (CANN operator documentation, aclnnWeightQuantBatchMatmulV2). The weight is read as int8 and
never written in floating point.
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
    flat,
    int8_of,
    with_bias,
)
from npugraph_ex.lifting.proposal import Build, Emit, Proposal, Unlike

_aten = torch.ops.aten
_CAST = _aten._to_copy.default  # noqa: SLF001 - the operator's name
_PRODUCTS = (_aten.mm.default, _aten.matmul.default, _aten.addmm.default)


@dataclass(frozen=True)
class _Weighted:
    """``x @ weight``, with ``weight`` as it lies in memory or ``transposed``; the scale and the bias that are part of it."""

    node: fx.Node
    x: fx.Node
    weight: fx.Node
    transposed: bool
    scale: fx.Node
    bias: fx.Node | None = None


def _weighted(node: fx.Node) -> _Weighted | None:
    """The product with an int8 weight that ``node`` is a cast or a reshape of."""
    inner = terms.core(node)
    while terms.calls(inner, *RESHAPES):
        inner = terms.core(inner.args[0])  # type: ignore[arg-type]
    if not terms.calls(inner, *_PRODUCTS) or inner.kwargs:
        return None
    *bias, x, operand = inner.args
    if not isinstance(x, fx.Node) or not isinstance(operand, fx.Node) or x.meta["val"].dtype not in TAKEN:
        return None
    source, transposed = terms.core(operand), False
    while terms.calls(source, *TRANSPOSED):
        source, transposed = terms.core(source.args[0]), not transposed  # type: ignore[arg-type]
    parts = terms.product(source)
    whole = [one for one in parts.factors if int8_of(one) is not None]
    scales = [one for one in parts.factors if one not in whole]
    if len(whole) != 1 or len(scales) != 1 or parts.divisors or parts.scale != 1:
        return None
    weight, turned = int8_of(whole[0])  # type: ignore[misc]
    if source.meta["val"].dim() != MATRIX or not _is_of_columns(scales[0], source, 0 if transposed else 1):
        return None
    return _Weighted(inner, x, weight, turned != transposed, scales[0], *bias)  # type: ignore[arg-type]


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
    ends_with = frozenset({_CAST, _aten.add.Tensor, *_PRODUCTS})

    def read(self, node: fx.Node) -> Proposal | Unlike | None:
        """The product that is ``node``."""
        value = terms.tensor(node)
        if value is None or value.dtype not in TAKEN or value.dim() < MATRIX:
            return None
        found = with_bias(node, value.shape[-1], _weighted)
        if found is None or found[0].number != 1:
            return None
        product, added = found[0].sum, found[1]
        if found[0].factors or (product.bias is not None and added is not None):
            return None
        return self._of(node, product, added if product.bias is None else product.bias)

    def _of(self, node: fx.Node, product: _Weighted, bias: fx.Node | None) -> Proposal | Unlike:
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
        scale = terms.of_dtype(product.scale, value.dtype) or product.scale
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
