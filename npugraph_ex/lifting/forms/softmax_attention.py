"""Attention as two products with a softmax between them => `npu_fusion_attention_v3`.

::

    y = safe_softmax(scale * q k^T + bias) v        over the keys; the scale may stand at q, at k or at the product

`scaled_dot_product_attention` becomes that where torch_npu has no kernel for its arguments, such as a bias. Queries, keys and
values are [B, N, S, D], or [N, S, D]. That operator adds the bias before it scales; with a bias and a scale it is
`npu_fusion_attention_v2`, which adds behind (``pse_type=0``): the scaled queries would be rounded to 16 bits. Queries in bfloat16
are scaled in front by a power of two, which rounds nothing: their products with keys may overflow float32. The operator takes a
bias for each head, query and key, so that a smaller one is repeated; a constant bias of zeros, such as the mask of a sequence
without padding, is left out. Heads of keys and values that several heads of queries share it takes as they are.

A row of scores that are all -inf gives 0 there, and in the safe softmax. The plain softmax gives NaN, so attention that is spelled
with it stays, with a mask or without: an infinite query, and a large one in bfloat16, have such scores by themselves. Nor has the
operator one value for such a row: CANN's published kernel (ops-transformer, `flash_attention_score`) puts the least number of
float32 in the place of what a mask hides, and of the keys that its tile lacks, so that a row gives 0, the mean of the values, or
NaN as the number of keys and the kernel's template are. Scores that are filled where a mask says so stay for this reason, too.

``every_row_attends``, an option, declares that there are no such rows. Then the judge leaves them out, and a mask that fills scores
becomes the operator's. Without the option a trace of `scaled_dot_product_attention` tells whether the program should call that
instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import getitem

import torch
from torch import fx

from npugraph_ex.graph.metadata import same_numbers
from npugraph_ex.graph.operators import is_view
from npugraph_ex.lifting import terms
from npugraph_ex.lifting.forms._attention_scores import MATMULS, Filled, Scores, scores_of
from npugraph_ex.lifting.forms._shared_heads import shared_heads
from npugraph_ex.lifting.proposal import Assumed, Build, Change, Emit, Proposal, Unlike
from npugraph_ex.lifting.trials import on_real_values, uniform

OPTION = "every_row_attends"

_aten = torch.ops.aten
_CAST = _aten._to_copy.default  # noqa: SLF001 - the operator's name
_SAFE = _aten._safe_softmax.default  # noqa: SLF001 - the operator's name
_SOFTMAXES = (_SAFE, _aten._softmax.default, _aten.softmax.int)  # noqa: SLF001 - the operator's name
_TAKEN = (torch.float16, torch.bfloat16)
_RANKS = (3, 4)
_WIDEST = 256
_NOT_SAFE = "for a row that is masked everywhere this softmax gives NaN, and the operator a number"
_NOT_FINITE = "where all scores of a row are -inf, as those of an infinite query, this softmax gives NaN, and the operator a number"
_EVERY_KEY = "in a row that is masked everywhere this softmax weighs all keys alike, and the operator may give 0"
_FILLED = "in a row that is masked everywhere this softmax gives 0, and the operator may weigh all keys alike"
_CALL = "call torch.nn.functional.scaled_dot_product_attention, which means the same as the operator"
_Sizes = tuple[int | torch.SymInt, ...]


def _is_zero(bias: fx.Node) -> bool:
    """Whether it is zeros of which the graph knows."""
    source = terms.core(bias)
    while is_view(source):
        source = terms.core(source.args[0])  # type: ignore[arg-type]
    known = uniform(source)
    with on_real_values():
        return known is not None and not known.any()


def _for_every_score(emit: Emit, bias: fx.Node, wanted: _Sizes) -> fx.Node:
    """The bias [1 or B, N, S, S] of scores whose last three sizes are ``wanted``."""
    bias = _of_rank_four(emit, bias)
    return _repeated(emit, bias, (bias.meta["val"].shape[0], *wanted))


def _hidden(emit: Emit, filled: Filled, mask: fx.Node, wanted: _Sizes) -> fx.Node:
    """The mask of scores of this shape, true where a score is left out: [S, S], [1, 1, S, S], [B, 1, S, S] or [B, N, S, S]."""
    mask = emit(_aten.logical_not.default, mask) if filled.keeps else mask
    batch, heads, *scores = wanted
    if same_numbers(mask.meta["val"].shape, scores):
        return mask
    mask = _of_rank_four(emit, mask)
    one, one_head = (terms.same_size(size, 1) for size in mask.meta["val"].shape[:2])
    return _repeated(emit, mask, (1 if one and one_head else batch, 1 if one_head else heads, *scores))


def _of_rank_four(emit: Emit, given: fx.Node) -> fx.Node:
    while given.meta["val"].dim() < _RANKS[-1]:
        given = emit(_aten.unsqueeze.default, given, 0)
    return given


def _repeated(emit: Emit, given: fx.Node, wanted: _Sizes) -> fx.Node:
    """A copy of these sizes, where the sizes are others."""
    sizes = given.meta["val"].shape
    if same_numbers(sizes, wanted):
        return given
    repeated = [-1 if terms.same_size(size, whole) else whole for size, whole in zip(sizes, wanted, strict=True)]
    every = emit(_aten.expand.default, given, repeated)
    return emit(_aten.clone.default, every, memory_format=torch.contiguous_format)


def _power_of_two(scale: float) -> float:
    """The largest that is no larger than ``scale`` without its sign."""
    return math.ldexp(0.5, math.frexp(scale)[1])


def _build(scale: float, heads: int, scores: _Sizes, filled: Filled | None) -> Build:
    """Of queries, keys, values, a bias if there is one, and the mask where scores are filled."""

    def by_heads(emit: Emit, x: fx.Node) -> fx.Node:
        return emit(_aten.unsqueeze.default, x, 0) if x.meta["val"].dim() < 4 else x

    def build(emit: Emit, q: fx.Node, k: fx.Node, v: fx.Node, *others: fx.Node) -> tuple[fx.Node, ...]:
        bias = others if filled is None else others[:-1]
        operands = [by_heads(emit, one) for one in (q, k, v)]
        pse, factor = _for_every_score(emit, bias[0], (heads, *scores)) if bias else None, scale
        if scale < 1.0 and q.meta["val"].dtype == torch.bfloat16:
            front = _power_of_two(scale)
            operands[0], factor = emit(_aten.mul.Tensor, operands[0], front), scale / front
        npu = torch.ops.npu
        given = (*operands, heads, "BNSD")
        named = {}
        if filled is not None:
            named["atten_mask"] = _hidden(emit, filled, others[-1], (operands[0].meta["val"].shape[0], heads, *scores))
        if bias and factor != 1.0:
            made = emit(npu.npu_fusion_attention_v2.default, *given, pse=pse, scale=factor, pse_type=0, **named)
        else:
            made = emit(npu.npu_fusion_attention_v3.default, *given, pse=pse, scale=factor, **named)
        result = emit(getitem, made, 0)
        return (emit(_aten.squeeze.dim, result, 0) if q.meta["val"].dim() < 4 else result,)

    return build


def _of_a_copy(build: Build) -> Build:
    """The same of queries that are copied first: the second version's result has the strides of its queries."""
    contiguous = {"memory_format": torch.contiguous_format}
    return lambda emit, q, *others: build(emit, emit(_aten.clone.default, q, **contiguous), *others)


def _as_torch_has_it(scale: float, filled: Filled | None) -> Callable[..., torch.Tensor]:
    def program(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *bias: torch.Tensor) -> torch.Tensor:
        times = q.shape[-3] // k.shape[-3]
        k, v = (one.repeat_interleave(times, -3) if times > 1 else one for one in (k, v))
        mask = bias[0] if bias else None
        if mask is not None and filled is not None and not filled.keeps:
            mask = ~mask
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)

    return program


def _unfit(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *added: torch.Tensor) -> str | None:
    """Why the operator does not take these; ``added`` are a bias and a mask, as far as there are."""
    *batch, heads, rows, width = q.shape
    if q.dim() not in _RANKS or not isinstance(heads, int) or not isinstance(width, int) or width > _WIDEST:
        return f"queries are {list(q.shape)}; the operator takes known heads and a known width up to {_WIDEST}"
    shared = k.shape[-3] if k.dim() == q.dim() else None
    keys = (*batch, shared, k.shape[-2], width)
    if not isinstance(shared, int) or heads % shared or not all(same_numbers(one.shape, keys) for one in (k, v)):
        return f"queries are {list(q.shape)}, keys {list(k.shape)} and values {list(v.shape)}"
    scores = (*batch, heads, rows, k.shape[-2])
    return next(filter(None, (_unfit_bias(one, scores) for one in added)), None)


def _unfit_bias(bias: torch.Tensor, scores: _Sizes) -> str | None:
    """Why a bias or a mask is not one for scores of this shape, if it is repeated where it has one for several."""
    whole = scores[max(len(scores) - bias.dim(), 0) :]
    repeated = [terms.same_size(size, 1) for size in bias.shape]
    fits = bias.dim() <= len(scores) and all(
        one or terms.same_size(size, wanted) for one, size, wanted in zip(repeated, bias.shape, whole, strict=True)
    )
    known = all(isinstance(wanted, int) for one, wanted in zip(repeated[-2:], whole[-2:], strict=False) if one)
    what = "mask" if bias.dtype == torch.bool else "bias"
    if what == "mask" and len(scores) == _RANKS[-1]:  # the operator has none for each head and all sequences
        one, one_head = [*[True] * (len(scores) - bias.dim()), *repeated][:2]
        known &= one_head or not one or isinstance(scores[0], int)
    return None if fits and known else f"the {what} is {list(bias.shape)} for scores of {list(scores)}"


def _against(softmax: fx.Node, found: Scores) -> str:
    """What the operator computes otherwise in a row that has no key; empty where nothing is."""
    if softmax.target is _SAFE:
        return "" if found.filled is None else _FILLED
    if found.filled is not None:
        return _NOT_SAFE if math.isinf(found.filled.value) else _EVERY_KEY
    return _NOT_FINITE if found.bias is None or _is_zero(found.bias) else _NOT_SAFE


@dataclass(frozen=True)
class _SoftmaxAttention:
    """The form; ``declared``: that every row has a key, so that the operator may differ in others."""

    declared: bool = False
    name = "lift_attention"
    ends_with = frozenset({*MATMULS, _CAST})

    def read(self, node: fx.Node) -> Proposal | Unlike | None:
        """The attention that ends with ``node``."""
        value, product = terms.tensor(node), terms.core(node)
        if value is None or value.dtype not in _TAKEN or not terms.calls(product, *MATMULS):
            return None
        softmax = terms.core(product.args[0])  # type: ignore[arg-type]
        if not terms.calls(softmax, *_SOFTMAXES):
            return None
        found = scores_of(softmax.args[0])  # type: ignore[arg-type]
        if found is None:
            return Unlike(softmax, "the softmax is not of a product of queries and keys, and at most one sum")
        return self._read(node, softmax, found)

    def _read(self, node: fx.Node, softmax: fx.Node, found: Scores) -> Proposal | Unlike:
        """What is proposed for a softmax of these scores, and its product with values."""
        value, product = node.meta["val"], terms.core(node)
        if not terms.is_last(softmax.args[1], softmax):
            return Unlike(softmax, f"the softmax is over dimension {softmax.args[1]}; the operator's is over the keys")
        k, v = (shared_heads(one) or one for one in (found.k, product.args[1]))  # type: ignore[arg-type]
        wanted = [found.q, k, v, *([] if found.bias is None or _is_zero(found.bias) else [found.bias])]
        operands = [terms.of_dtype(one, value.dtype) for one in wanted]  # type: ignore[arg-type]
        taken = tuple(one for one in operands if one is not None)
        reason = _against(softmax, found)
        if len(taken) < len(wanted):
            return Unlike(softmax, f"queries, keys, values or the bias are not {value.dtype}, as the result is")
        inputs = taken if found.filled is None else (*taken, found.filled.mask)
        unfit = _unfit(*(one.meta["val"] for one in inputs))
        if unfit is not None:
            return Unlike(softmax, f"{reason}; {unfit}" if reason else unfit)
        proposal = _proposal(node, inputs, found, softmax)
        if not reason:
            return replace(proposal, assumed=None)
        if self.declared:
            return proposal
        both = found.filled is not None and len(taken) > 3
        return Unlike(softmax, reason, None if both else _changed(proposal, found), declared=proposal)


def _proposal(node: fx.Node, inputs: tuple[fx.Node, ...], found: Scores, softmax: fx.Node) -> Proposal:
    """The operator, in the rows that have a key."""
    queries, keys = (one.meta["val"] for one in inputs[:2])
    heads, rows = queries.shape[-3:-1]
    build = _build(found.scale, heads, (rows, keys.shape[-2]), found.filled)
    least = -math.inf if found.filled is None else found.filled.least
    assumed = Assumed(OPTION, softmax.args[0], least)  # type: ignore[arg-type]
    return Proposal(
        inputs, (node,), (build, _of_a_copy(build)), (heads, keys.shape[-3]), sums_rows=True, assumed=assumed
    )


def _changed(proposal: Proposal, found: Scores) -> Change:
    """The call of torch's own attention; its inputs are those of the proposal."""
    mask = "" if len(proposal.inputs) == 3 else f", attn_mask={found.filled.argument if found.filled else 'mask'}"
    line = f"y = torch.nn.functional.scaled_dot_product_attention(q, k, v{mask}, scale=scale)"
    program = _as_torch_has_it(found.scale, found.filled)
    return Change(proposal, "scaled_dot_product_attention", program, _CALL, line)


FORM = _SoftmaxAttention()
DECLARED = _SoftmaxAttention(declared=True)
