"""Attention as two products with a softmax between them => `npu_fusion_attention_v3`.

::

    y = safe_softmax(scale * q k^T + bias) v        over the keys; the scale may stand at q, at k or at the product

`scaled_dot_product_attention` becomes that where torch_npu has no kernel for its arguments, such as a bias. Queries, keys and
values are [B, N, S, D], or [N, S, D]. That operator adds the bias before it scales; with a bias and a scale it is
`npu_fusion_attention_v2`, which adds behind (``pse_type=0``): the scaled queries would be rounded to 16 bits. Queries in bfloat16
are scaled in front by a power of two, which rounds nothing: their products with keys may overflow float32. The operator takes a
bias for each head, query and key, so that a smaller one is repeated; a constant bias of zeros, such as the mask of a sequence
without padding, is left out. Heads of keys and values that several heads of queries share it takes as they are. A row of scores
that are all -inf gives 0 there, and in the safe softmax. The plain softmax gives NaN, so attention that is spelled with it stays,
with a mask or without: an infinite query, and a large one in bfloat16, have such scores by themselves. Scores that are filled where
a mask says so stay, too. A trace of `scaled_dot_product_attention` tells whether the program should call that instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from operator import getitem

import torch
from torch import fx

from npugraph_ex.graph.metadata import same_numbers
from npugraph_ex.graph.operators import is_view
from npugraph_ex.lifting import terms
from npugraph_ex.lifting.forms._shared_heads import shared_heads
from npugraph_ex.lifting.proposal import Build, Change, Emit, Proposal, Unlike
from npugraph_ex.lifting.trials import on_real_values, uniform

_aten = torch.ops.aten
_CAST = _aten._to_copy.default  # noqa: SLF001 - the operator's name
_SAFE = _aten._safe_softmax.default  # noqa: SLF001 - the operator's name
_SOFTMAXES = (_SAFE, _aten._softmax.default, _aten.softmax.int)  # noqa: SLF001 - the operator's name
_MATMULS = (_aten.matmul.default, _aten.bmm.default)
_TAKEN = (torch.float16, torch.bfloat16)
_RANKS = (3, 4)
_WIDEST = 256
_NOT_SAFE = "for a row that is masked everywhere this softmax gives NaN, and the operator 0"
_NOT_FINITE = (
    "where all scores of a row are -inf, as those of an infinite query, this softmax gives NaN, and the operator 0"
)
_EVERY_KEY = "in a row that is masked everywhere this softmax weighs all keys alike, and the operator gives 0"
_FILLED = "the scores are filled where a mask says so, and the operator adds a bias"
_CALL = "call torch.nn.functional.scaled_dot_product_attention, which means the same as the operator"
_LEAST = -1e4
"""A score as low as this is no longer one: its key has no weight."""


@dataclass(frozen=True)
class _Filled:
    """Scores with ``value`` in the place of those that ``mask`` hides, or does not keep."""

    scores: fx.Node
    mask: fx.Node
    keeps: bool
    value: float

    @property
    def argument(self) -> str:
        """What `scaled_dot_product_attention` calls it: there the mask is true where a score stays."""
        return "mask" if self.keeps else "~mask"


@dataclass(frozen=True)
class _Scores:
    """``scale * q k^T + bias``."""

    q: fx.Node
    k: fx.Node
    scale: float
    bias: fx.Node | None


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


def _scores(node: fx.Node) -> _Scores | None:
    """What the softmax is of; None where it is no product of queries and keys."""
    inner = terms.core(node)
    added = terms.calls(inner, _aten.add.Tensor) and inner.kwargs.get("alpha", 1) == 1
    pairs = (inner.args[:2], inner.args[1::-1]) if added else ((node, None),)
    for product, bias in pairs:
        if not isinstance(product, fx.Node) or not isinstance(bias, (fx.Node, type(None))):
            continue
        scaled, scale = _scaled(product)
        matmul = terms.core(scaled)
        if not terms.calls(matmul, *_MATMULS):
            continue
        (q, of_q), (turned, of_turned) = _scaled(matmul.args[0]), _scaled(matmul.args[1])  # type: ignore[arg-type]
        k = _transposed(terms.core(turned))
        if k is None:
            continue
        k, of_k = _scaled(k)
        return _Scores(q, k, scale * of_q * of_turned * of_k, bias)
    return None


def _filled(node: fx.Node) -> _Filled | None:
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
            return _Filled(scores, mask, keeps, low)
    return None


def _number(value: object) -> float | None:
    """A number, or that of a tensor with one number everywhere."""
    known = uniform(value) if isinstance(value, fx.Node) else None
    with on_real_values():
        return terms.number(value) if known is None else float(known.flatten()[0])


def _transposed(node: fx.Node) -> fx.Node | None:
    """``x`` where ``node`` is x with its last two dimensions in each other's place."""
    value = terms.tensor(node)
    if value is None or not terms.calls(node, _aten.transpose.int):
        return None
    last = {value.dim() - 2, value.dim() - 1}
    return node.args[0] if {dim % value.dim() for dim in node.args[1:3]} == last else None  # type: ignore[operator,return-value]


def _is_zero(bias: fx.Node) -> bool:
    """Whether it is zeros of which the graph knows."""
    source = terms.core(bias)
    while is_view(source):
        source = terms.core(source.args[0])  # type: ignore[arg-type]
    known = uniform(source)
    with on_real_values():
        return known is not None and not known.any()


def _for_every_score(emit: Emit, bias: fx.Node, wanted: tuple[int | torch.SymInt, ...]) -> fx.Node:
    """The bias [1 or B, N, S, S] of scores whose last three sizes are ``wanted``."""
    while bias.meta["val"].dim() < _RANKS[-1]:
        bias = emit(_aten.unsqueeze.default, bias, 0)
    given = bias.meta["val"].shape[1:]
    if same_numbers(given, wanted):
        return bias
    sizes = [-1 if terms.same_size(size, whole) else whole for size, whole in zip(given, wanted, strict=True)]
    every = emit(_aten.expand.default, bias, [-1, *sizes])
    return emit(_aten.clone.default, every, memory_format=torch.contiguous_format)


def _power_of_two(scale: float) -> float:
    """The largest that is no larger than ``scale`` without its sign."""
    return math.ldexp(0.5, math.frexp(scale)[1])


def _build(scale: float, heads: int, scores: tuple[int | torch.SymInt, int | torch.SymInt]) -> Build:
    def by_heads(emit: Emit, x: fx.Node) -> fx.Node:
        return emit(_aten.unsqueeze.default, x, 0) if x.meta["val"].dim() < 4 else x

    def build(emit: Emit, q: fx.Node, k: fx.Node, v: fx.Node, *bias: fx.Node) -> tuple[fx.Node, ...]:
        operands = [by_heads(emit, one) for one in (q, k, v)]
        pse, factor = _for_every_score(emit, bias[0], (heads, *scores)) if bias else None, scale
        if scale < 1.0 and q.meta["val"].dtype == torch.bfloat16:
            front = _power_of_two(scale)
            operands[0], factor = emit(_aten.mul.Tensor, operands[0], front), scale / front
        npu = torch.ops.npu
        given = (*operands, heads, "BNSD")
        if bias and factor != 1.0:
            made = emit(npu.npu_fusion_attention_v2.default, *given, pse=pse, scale=factor, pse_type=0)
        else:
            made = emit(npu.npu_fusion_attention_v3.default, *given, pse=pse, scale=factor)
        result = emit(getitem, made, 0)
        return (emit(_aten.squeeze.dim, result, 0) if q.meta["val"].dim() < 4 else result,)

    return build


def _as_torch_has_it(scale: float, filled: _Filled | None) -> Callable[..., torch.Tensor]:
    def program(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *bias: torch.Tensor) -> torch.Tensor:
        times = q.shape[-3] // k.shape[-3]
        k, v = (one.repeat_interleave(times, -3) if times > 1 else one for one in (k, v))
        mask = bias[0] if bias else None
        if mask is not None and filled is not None and not filled.keeps:
            mask = ~mask
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)

    return program


def _unfit(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None) -> str | None:
    """Why the operator does not take these."""
    *batch, heads, rows, width = q.shape
    if q.dim() not in _RANKS or not isinstance(heads, int) or not isinstance(width, int) or width > _WIDEST:
        return f"queries are {list(q.shape)}; the operator takes known heads and a known width up to {_WIDEST}"
    shared = k.shape[-3] if k.dim() == q.dim() else None
    keys = (*batch, shared, k.shape[-2], width)
    if not isinstance(shared, int) or heads % shared or not all(same_numbers(one.shape, keys) for one in (k, v)):
        return f"queries are {list(q.shape)}, keys {list(k.shape)} and values {list(v.shape)}"
    return None if bias is None else _unfit_bias(bias, (*batch, heads, rows, k.shape[-2]))


def _unfit_bias(bias: torch.Tensor, scores: tuple[int | torch.SymInt, ...]) -> str | None:
    """Why a bias is not one for scores of this shape, if it is repeated where it has one for several."""
    whole = scores[max(len(scores) - bias.dim(), 0) :]
    repeated = [terms.same_size(size, 1) for size in bias.shape]
    fits = bias.dim() <= len(scores) and all(
        one or terms.same_size(size, wanted) for one, size, wanted in zip(repeated, bias.shape, whole, strict=True)
    )
    known = all(isinstance(wanted, int) for one, wanted in zip(repeated[-2:], whole[-2:], strict=False) if one)
    return None if fits and known else f"the bias is {list(bias.shape)} for scores of {list(scores)}"


class _SoftmaxAttention:
    """The form."""

    name = "lift_attention"
    ends_with = frozenset({*_MATMULS, _CAST})

    def read(self, node: fx.Node) -> Proposal | Unlike | None:
        """The attention that ends with ``node``."""
        value, product = terms.tensor(node), terms.core(node)
        if value is None or value.dtype not in _TAKEN or not terms.calls(product, *_MATMULS):
            return None
        softmax = terms.core(product.args[0])  # type: ignore[arg-type]
        if not terms.calls(softmax, *_SOFTMAXES):
            return None
        filled = _filled(softmax.args[0])  # type: ignore[arg-type]
        found = _scores(filled.scores if filled is not None else softmax.args[0])  # type: ignore[arg-type]
        if found is None:
            return Unlike(softmax, "the softmax is not of a product of queries and keys, and at most one sum")
        if not terms.is_last(softmax.args[1], softmax):
            return Unlike(softmax, f"the softmax is over dimension {softmax.args[1]}; the operator's is over the keys")
        k, v = (shared_heads(one) or one for one in (found.k, product.args[1]))  # type: ignore[arg-type]
        wanted = [found.q, k, v, *([] if found.bias is None or _is_zero(found.bias) else [found.bias])]
        operands = [terms.of_dtype(one, value.dtype) for one in wanted]  # type: ignore[arg-type]
        taken = tuple(one for one in operands if one is not None)
        if filled is not None:
            return self._of_filled(node, softmax, filled, found, taken)
        if len(taken) < len(wanted):
            return Unlike(softmax, f"queries, keys, values or the bias are not {value.dtype}, as the result is")
        queries, keys, values, *bias = (one.meta["val"] for one in taken)
        unfit = _unfit(queries, keys, values, bias[0] if bias else None)
        if unfit is not None:
            return Unlike(softmax, unfit)
        heads, rows, width = queries.shape[-3:]
        sizes = (heads, keys.shape[-3], width)
        build = _build(found.scale, heads, (rows, keys.shape[-2]))
        proposal = Proposal(taken, (node,), (build,), sizes, sums_rows=True)
        plain = Unlike(softmax, _NOT_SAFE if bias else _NOT_FINITE, _changed(proposal, found.scale, None))
        return proposal if softmax.target is _SAFE else plain

    def _of_filled(
        self, node: fx.Node, softmax: fx.Node, filled: _Filled, found: _Scores, taken: tuple[fx.Node, ...]
    ) -> Unlike:
        """Why attention over filled scores stays, and the lines that would bring the operator."""
        reason = _FILLED if softmax.target is _SAFE else _NOT_SAFE if math.isinf(filled.value) else _EVERY_KEY
        if len(taken) != 3:  # a bias besides, or other dtypes
            return Unlike(softmax, reason)
        unfit = _unfit(*(one.meta["val"] for one in (*taken, filled.mask)))
        if unfit is not None:
            return Unlike(softmax, f"{reason}; {unfit}")
        proposal = Proposal((*taken, filled.mask), (node,), ())
        return Unlike(softmax, reason, _changed(proposal, found.scale, filled))


def _changed(proposal: Proposal, scale: float, filled: _Filled | None) -> Change:
    """The call of torch's own attention; its inputs are those of the proposal."""
    mask = "" if len(proposal.inputs) == 3 else f", attn_mask={filled.argument if filled else 'mask'}"
    line = f"y = torch.nn.functional.scaled_dot_product_attention(q, k, v{mask}, scale=scale)"
    return Change(proposal, "scaled_dot_product_attention", _as_torch_has_it(scale, filled), _CALL, line)


FORM = _SoftmaxAttention()
