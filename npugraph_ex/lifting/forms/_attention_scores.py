"""Reads the scores of an attention: ``scale * q k^T + bias``, and a mask that fills some of them.

The scale may stand at q, at k or at the product.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from npugraph_ex.lifting import terms
from npugraph_ex.lifting.trials import on_real_values, uniform

_aten = torch.ops.aten
MATMULS = (_aten.matmul.default, _aten.bmm.default)
_LEAST = -9984.0
"""A score as low as this is no longer one: its key has no weight. It is -1e4 in bfloat16."""
_NO_WEIGHT = 128.0
"""How much lower than another a score has no weight in float32, where exp(-104) is 0."""


@dataclass(frozen=True)
class Filled:
    """Scores with ``value`` in the place of those that ``mask`` hides, or does not keep."""

    scores: fx.Node
    mask: fx.Node
    keeps: bool
    value: float

    @property
    def argument(self) -> str:
        """What `scaled_dot_product_attention` calls it: there the mask is true where a score stays."""
        return "mask" if self.keeps else "~mask"

    @property
    def least(self) -> float:
        """What the largest score of a row must be above, so that those in the mask's places have no weight."""
        return self.value + _NO_WEIGHT


@dataclass(frozen=True)
class Scores:
    """``scale * q k^T + bias``, filled where a mask says so."""

    q: fx.Node
    k: fx.Node
    scale: float
    bias: fx.Node | None
    filled: Filled | None


def scores_of(node: fx.Node) -> Scores | None:
    """What the softmax is of; None where it is no product of queries and keys."""
    filled = _filled(node)
    inner = terms.core(node if filled is None else filled.scores)
    added = terms.calls(inner, _aten.add.Tensor) and inner.kwargs.get("alpha", 1) == 1
    pairs = (inner.args[:2], inner.args[1::-1]) if added else ((inner, None),)
    for product, bias in pairs:
        if not isinstance(product, fx.Node) or not isinstance(bias, (fx.Node, type(None))):
            continue
        scaled, scale = _scaled(product)
        matmul = terms.core(scaled)
        if not terms.calls(matmul, *MATMULS):
            continue
        (q, of_q), (turned, of_turned) = _scaled(matmul.args[0]), _scaled(matmul.args[1])  # type: ignore[arg-type]
        k = _transposed(terms.core(turned))
        if k is None:
            continue
        k, of_k = _scaled(k)
        return Scores(q, k, scale * of_q * of_turned * of_k, bias, filled)
    return None


def _scaled(node: fx.Node) -> tuple[fx.Node, float]:
    """``(x, c)`` where ``node`` is ``c * x``, and x is no product with a number."""
    scale = 1.0
    while True:
        inner = terms.core(node)
        by = terms.number(inner.args[1]) if len(inner.args) > 1 else None
        if by and terms.calls(inner, _aten.mul.Tensor, _aten.mul.Scalar):
            scale *= by
        elif by and terms.calls(inner, _aten.div.Tensor, _aten.div.Scalar) and not inner.kwargs:
            scale /= by
        else:
            return node, scale
        node = inner.args[0]  # type: ignore[assignment]


def _filled(node: fx.Node) -> Filled | None:
    """``masked_fill(scores, mask, value)``, or a choice by a mask, with a value so low that it hides the score."""
    inner = terms.core(node)
    if terms.calls(inner, _aten.masked_fill.Scalar, _aten.masked_fill.Tensor):
        scores, mask, value = inner.args
        choices = ((scores, mask, False, value),)
    elif terms.calls(inner, _aten.where.self, _aten.where.ScalarOther, _aten.where.ScalarSelf):
        mask, one, other = inner.args
        choices = ((one, mask, True, other), (other, mask, False, one))  # type: ignore[assignment]
    else:
        return None
    for scores, mask, keeps, value in choices:
        low = _number(value)
        if isinstance(scores, fx.Node) and isinstance(mask, fx.Node) and low is not None and low <= _LEAST:
            return Filled(scores, mask, keeps, low)
    return None


def _number(value: object) -> float | None:
    """A number, or that of a tensor with one number everywhere, as its dtype has it."""
    with on_real_values():
        if terms.calls(value, _aten.scalar_tensor.default) and terms.number(value.args[0]) is not None:
            return float(torch.tensor(value.args[0], dtype=value.meta["val"].dtype))
        known = uniform(value) if isinstance(value, fx.Node) else None
        return terms.number(value) if known is None else float(known.flatten()[0])


def _transposed(node: fx.Node) -> fx.Node | None:
    """``x`` where ``node`` is x with its last two dimensions in each other's place."""
    value = terms.tensor(node)
    if value is None or not terms.calls(node, _aten.transpose.int):
        return None
    last = {value.dim() - 2, value.dim() - 1}
    return node.args[0] if {dim % value.dim() for dim in node.args[1:3]} == last else None  # type: ignore[operator,return-value]
