"""Attention as two products with a softmax between them => `npu_fusion_attention_v3`.

::

    y = safe_softmax(scale * q k^T + bias) v        over the keys; the scale may stand at q, at k or at the product

The products are `matmul`, `bmm`, `baddbmm`, or what `einsum` makes of them: `_matrices.py` sees queries, keys and values through
the views and copies around these. A softmax of scores from each row of which the largest one is taken is the plain softmax: in a
row whose largest one is infinite or NaN it gives NaN, too.

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
from typing import Any

import torch
from torch import fx

from npugraph_ex.graph.metadata import same_numbers
from npugraph_ex.lifting import terms
from npugraph_ex.lifting.forms._attention_scores import (
    MATMULS,
    Filled,
    HeadOperand,
    Scores,
    Sizes,
    operand,
    product_behind,
    scores_in,
    scores_of,
)
from npugraph_ex.lifting.forms._matrices import Matrices, moves
from npugraph_ex.lifting.forms._read_attention import RANKS, ReadAttention, ordered, viewed
from npugraph_ex.lifting.forms._shared_heads import shared_heads
from npugraph_ex.lifting.proposal import Assumed, Build, Change, Emit, Proposal, Unlike

_MORE_COLUMNS = (
    "the softmax has columns beside those of the keys, such as a sink; the operator's is over the keys alone"
)
OPTION = "every_row_attends"

_aten = torch.ops.aten
_CAST = _aten._to_copy.default  # noqa: SLF001 - the operator's name
_SAFE = _aten._safe_softmax.default  # noqa: SLF001 - the operator's name
_SOFTMAXES = (_SAFE, _aten._softmax.default, _aten.softmax.int)  # noqa: SLF001 - the operator's name
_TAKEN = (torch.float16, torch.bfloat16)
_WIDEST = 256
_SIZES = f"known heads and a known width up to {_WIDEST}"
_NOT_SAFE = "for a row that is masked everywhere this softmax gives NaN, and the operator a number"
_NOT_FINITE = "where all scores of a row are -inf, as those of an infinite query, this softmax gives NaN, and the operator a number"
_EVERY_KEY = "in a row that is masked everywhere this softmax weighs all keys alike, and the operator may give 0"
_FILLED = "in a row that is masked everywhere this softmax gives 0, and the operator may weigh all keys alike"
_OTHER_DIMENSIONS = "of queries, keys, values and the result, one is no view or copy of [B, N, S, D] or [N, S, D]"
_CALL = "call torch.nn.functional.scaled_dot_product_attention, which means the same as the operator"


def _is_zero(bias: fx.Node) -> bool:
    """Whether it is zeros of which the graph knows."""
    return terms.constant(bias) == 0


def _for_every_score(emit: Emit, bias: fx.Node, wanted: Sizes) -> fx.Node:
    """The bias [1 or B, N, S, S] of scores whose last three sizes are ``wanted``."""
    bias = _of_rank_four(emit, bias)
    return _repeated(emit, bias, (bias.meta["val"].shape[0], *wanted))


def _hidden(emit: Emit, filled: Filled, mask: fx.Node, wanted: Sizes) -> fx.Node:
    """The mask of scores of this shape, true where a score is left out: [S, S], [1, 1, S, S], [B, 1, S, S] or [B, N, S, S]."""
    mask = emit(_aten.logical_not.default, mask) if filled.keeps else mask
    batch, heads, *scores = wanted
    if same_numbers(mask.meta["val"].shape, scores):
        return mask
    mask = _of_rank_four(emit, mask)
    one, one_head = (terms.same_size(size, 1) for size in mask.meta["val"].shape[:2])
    return _repeated(emit, mask, (1 if one and one_head else batch, 1 if one_head else heads, *scores))


def _of_rank_four(emit: Emit, given: fx.Node) -> fx.Node:
    while given.meta["val"].dim() < RANKS[-1]:
        given = emit(_aten.unsqueeze.default, given, 0)
    return given


def _repeated(emit: Emit, given: fx.Node, wanted: Sizes) -> fx.Node:
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


def _build(scale: float, found: ReadAttention, copied: bool) -> Build:  # noqa: FBT001 - named by its only caller
    """Of queries, which may be ``copied`` first, keys, values, biases, and the mask where scores are filled.

    The second version's result has the strides of its queries.
    """
    cuts = [found.cut(one) for one in found.added]
    orders = [one.order for one in found.operands]
    _, heads, *scores = whole = found.sizes if len(found.sizes) == RANKS[-1] else (1, *found.sizes)

    def build(emit: Emit, *given: fx.Node) -> tuple[fx.Node, ...]:
        operands = [ordered(emit, one, order) for one, order in zip(given[:3], orders, strict=True)]
        if copied:
            operands[0] = emit(_aten.clone.default, operands[0], memory_format=torch.contiguous_format)
        added = [viewed(emit, one, sizes) for one, sizes in zip(given[3:], cuts, strict=False)]
        biases = added[: len(found.biases)]
        factor = scale
        pse = _for_every_score(emit, _sum(emit, biases), (heads, *scores)) if biases else None
        if scale < 1.0 and operands[0].meta["val"].dtype == torch.bfloat16:
            front = _power_of_two(scale)
            operands[0], factor = emit(_aten.mul.Tensor, operands[0], front), scale / front
        npu = torch.ops.npu
        taken = (*operands, heads, "BNSD")
        named = {}
        if found.filled is not None:
            named["atten_mask"] = _hidden(emit, found.filled, added[-1], whole)
        if biases and factor != 1.0:
            made = emit(npu.npu_fusion_attention_v2.default, *taken, pse=pse, scale=factor, pse_type=0, **named)
        else:
            made = emit(npu.npu_fusion_attention_v3.default, *taken, pse=pse, scale=factor, **named)
        result = emit(getitem, made, 0)
        if len(orders[0]) < RANKS[-1]:
            result = emit(_aten.squeeze.dim, result, 0)
        order = found.result.order
        if not found.result.is_ordered:
            result = emit(_aten.permute.default, result, [order.index(dim) for dim in range(len(order))])
        return (result,)

    return build


def _sum(emit: Emit, biases: list[fx.Node]) -> fx.Node:
    first, *others = biases
    for other in others:
        first = emit(_aten.add.Tensor, first, other)
    return first


def _as_torch_has_it(found: ReadAttention) -> Callable[..., torch.Tensor]:
    def program(*given: torch.Tensor) -> torch.Tensor:
        q, k, v = (one.permute(operand.order) for one, operand in zip(given[:3], found.operands, strict=True))
        times = q.shape[-3] // k.shape[-3]
        k, v = (one.repeat_interleave(times, -3) if times > 1 else one for one in (k, v))
        added = [one.view(found.cut(bias)) for one, bias in zip(given[3:], found.added, strict=False)]
        mask = sum(added[1:], added[0]) if added else None
        if mask is not None and found.filled is not None and not found.filled.keeps:
            mask = ~mask
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=found.scale)

    return program


def _unfit(found: ReadAttention) -> str | None:
    """Why the operator does not take these."""
    q, k, v = (one.sizes for one in found.operands)
    *batch, heads, _, width = q
    if len(q) not in RANKS or not isinstance(heads, int) or not isinstance(width, int):
        return f"queries are {list(q)}; the operator takes {_SIZES}"
    shared = k[-3] if len(k) == len(q) else None
    keys = (*batch, shared, k[-2], width)
    if not isinstance(shared, int) or heads % shared or not all(same_numbers(one, keys) for one in (k, v)):
        return f"queries are {list(q)}, keys {list(k)} and values {list(v)}"
    reasons = (_unfit_bias(one.node.meta["val"], found.cut(one), found.sizes) for one in found.added)
    return next(filter(None, reasons), None)


def _unlike_any(queries: HeadOperand) -> str | None:
    """Why the operator takes no such queries, whatever the keys are; torch's own attention may be several kernels then."""
    dtype = queries.node.meta["val"].dtype
    if dtype not in _TAKEN:
        return f"the operator takes float16 and bfloat16, and queries are {dtype}"
    wide = queries.sizes[-1] > _WIDEST
    return f"queries are {list(queries.sizes)}; the operator takes {_SIZES}" if wide else None


def _unfit_bias(bias: torch.Tensor, shape: Sizes, scores: Sizes) -> str | None:
    """Why a bias or a mask is not one for scores of this shape, if it is repeated where it has one for several."""
    whole = scores[max(len(scores) - len(shape), 0) :]
    repeated = [terms.same_size(size, 1) for size in shape]
    fits = len(shape) <= len(scores) and all(
        one or terms.same_size(size, wanted) for one, size, wanted in zip(repeated, shape, whole, strict=True)
    )
    known = all(isinstance(wanted, int) for one, wanted in zip(repeated[-2:], whole[-2:], strict=False) if one)
    what = "mask" if bias.dtype == torch.bool else "bias"
    if len(shape) > bias.dim() and sum(not isinstance(size, int) for size in shape) > 1:
        return (
            f"the {what} has batches and heads in one dimension, and a view as {list(shape)} has more than one symbol"
        )
    if what == "mask" and len(scores) == RANKS[-1]:  # the operator has none for each head and all sequences
        one, one_head = [*[True] * (len(scores) - len(shape)), *repeated][:2]
        known &= one_head or not one or isinstance(scores[0], int)
    return None if fits and known else f"the {what} is {list(shape)} for scores of {list(scores)}"


def _against(softmax: fx.Node, found: Scores) -> str:
    """What the operator computes otherwise in a row that has no key; empty where nothing is."""
    if softmax.target is _SAFE and not found.shifted:
        return "" if found.filled is None else _FILLED
    if found.filled is not None:
        return _NOT_SAFE if math.isinf(found.filled.value) else _EVERY_KEY
    return _NOT_FINITE if all(_is_zero(one.node) for one in found.biases) else _NOT_SAFE


def _attended(node: fx.Node) -> tuple[fx.Node, Matrices, Matrices, Matrices] | None:
    """A softmax whose product with values is ``node``, or is cast to it behind views.

    Returns:
        The softmax, and its rows and columns as the product reads them; values, and the product.
    """
    product = product_behind(node)
    if isinstance(product, str) or product.scale != 1 or product.added is not None or product.ignored is not None:
        return None
    left, right = Matrices.of(product.left), Matrices.of(product.right)
    for weights, values, result in (
        (left, right, product.seen),
        (right.turned(), left.turned(), product.seen.turned()),
    ):
        found: Matrices | None = weights
        while found is not None:
            softmax = terms.core(found.node)
            if terms.calls(softmax, *_SOFTMAXES):
                return softmax, found, values, result
            found = found.before()
    return None


def _has_more_columns(softmax: fx.Node) -> bool:
    """Whether it is the softmax of scores that are joined to other columns."""
    if not terms.calls(softmax, *_SOFTMAXES):
        return False
    whole = terms.core(softmax.args[0])  # type: ignore[arg-type]
    whole = terms.core(whole.args[0]) if terms.calls(whole, _aten.sub.Tensor) else whole  # type: ignore[arg-type]
    parts = whole.args[0] if terms.calls(whole, _aten.cat.default) else ()
    return any(isinstance(scores_in(one), Scores) for one in parts)  # type: ignore[union-attr,arg-type]


def _scaled_weights(node: fx.Node) -> Unlike | None:
    """Why attention stays whose weights are multiplied behind the softmax, where a product of matrices reads such weights."""
    product = product_behind(node)
    for one in () if isinstance(product, str) else (product.left, product.right):
        weights = terms.core(one)
        while moves(weights) is not None:
            weights = terms.core(weights.args[0])  # type: ignore[arg-type]
        if terms.calls(weights, _aten.slice.Tensor) and _has_more_columns(terms.core(weights.args[0])):  # type: ignore[arg-type]
            return Unlike(terms.core(weights.args[0]), _MORE_COLUMNS)  # type: ignore[arg-type]
        parts = terms.product(weights)
        softmax = next((inner for inner in map(terms.core, parts.factors) if terms.calls(inner, *_SOFTMAXES)), None)
        if softmax is None or parts.alone is not None or isinstance(scores_of(softmax), str):
            continue
        by_number = len(parts.factors) == 1 and not parts.divisors
        lines = f"y = (weights @ v) * {parts.scale:.6g}   # weights as the softmax gives them" if by_number else ""
        factor = f"{parts.scale:.6g}" if by_number else "a tensor"
        return Unlike(
            softmax, f"the weights are multiplied by {factor} behind the softmax; the operator takes none", lines=lines
        )
    return None


def _result(found: Matrices | None, rank: int) -> HeadOperand | None:
    """The nearest view of this rank of a result."""
    while found is not None:
        order = found.order(rank)
        if order is not None:
            return HeadOperand(found.node, order)
        found = found.behind()
    return None


def _read_as(rank: int, found: Scores, values: Matrices, result: Matrices) -> ReadAttention | None:
    """All of these in nodes of this rank."""
    q, k = (operand(one, rank, multiple=True) for one in (found.q, found.k))
    v, made = operand(values, rank), _result(result, rank)
    seen = found.seen.node.meta["val"].dim()
    if q is None or k is None or v is None or made is None or seen > rank:
        return None
    if seen < rank and terms.same_size(q.sizes[1], 1):  # the heads are not known
        return None
    if not same_numbers(made.sizes, (*q.sizes[:-1], v.sizes[-1])):
        return None
    biases = tuple(one for one in found.biases if not _is_zero(one.node))
    order = found.seen.order(seen)
    if order is None or ((biases or found.filled) and order != tuple(range(seen))):
        return None
    k, v = (
        replace(one, node=shared_heads(one.node) or one.node) if rank == RANKS[-1] and one.is_ordered else one
        for one in (k, v)
    )
    return ReadAttention((q, k, v), made, found.scale * q.scale * k.scale, biases, found.filled, order)


@dataclass(frozen=True)
class _SoftmaxAttention:
    """The form; ``declared``: that every row has a key, so that the operator may differ in others."""

    declared: bool = False
    name = "lift_attention"
    ends_with = frozenset({*MATMULS, _CAST})

    def read(self, node: fx.Node) -> Proposal | Unlike | None:
        """The attention that ends with ``node``."""
        value = terms.tensor(node)
        if value is None or not value.is_floating_point():
            return None
        attended = _attended(node)
        if attended is None:
            return _scaled_weights(node)
        softmax, weights, values, result = attended
        found = scores_of(softmax)
        if isinstance(found, str):
            return Unlike(softmax, found)
        if not terms.is_last(softmax.args[1], softmax):
            return Unlike(softmax, f"the softmax is over dimension {softmax.args[1]}; the operator's is over the keys")
        if not weights.is_same(found.seen):
            return Unlike(
                softmax, "the product with the values reads the weights in another order than the softmax gives them"
            )
        taken = next(filter(None, (_read_as(rank, found, values, result) for rank in reversed(RANKS))), None)
        if taken is None:
            return Unlike(softmax, _OTHER_DIMENSIONS)
        return self._read(softmax, found, taken)

    def _read(self, softmax: fx.Node, found: Scores, taken: ReadAttention) -> Proposal | Unlike | None:
        """What is proposed for a softmax of these scores, and its product with values."""
        dtype = taken.result.node.meta["val"].dtype
        operands, biases = (_of_dtype(ones, dtype) for ones in (taken.operands, taken.biases))
        if operands is None or biases is None:
            if dtype not in _TAKEN:
                return None  # it may be cast back, and that cast is where an attention of this dtype ends
            return Unlike(softmax, f"queries, keys, values or the bias are not {dtype}, as the result is")
        taken = replace(taken, operands=operands, biases=biases)
        reason, unfit = _against(softmax, found), _unfit(taken)
        if unfit is not None:
            return Unlike(softmax, f"{reason}; {unfit}" if reason else unfit)
        proposal = _proposal(taken, found)
        both = found.filled is not None and taken.biases
        change = _changed(proposal, taken) if reason and not both else None
        unlike = _unlike_any(taken.operands[0])
        if unlike is not None:
            return Unlike(softmax, f"{reason}; {unlike}" if reason else unlike, change)
        if not reason:
            return replace(proposal, assumed=None)
        if self.declared:
            return proposal
        return Unlike(softmax, reason, change, declared=proposal)


def _of_dtype(read: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...] | None:
    """Operands or biases as they were when they had this dtype; None where one never had it."""
    nodes = [terms.of_dtype(one.node, dtype) for one in read]
    return None if None in nodes else tuple(replace(one, node=node) for one, node in zip(read, nodes, strict=True))


def _proposal(taken: ReadAttention, found: Scores) -> Proposal:
    """The operator, in the rows that have a key."""
    builds = tuple(_build(taken.scale, taken, copied) for copied in (False, True))
    least = -math.inf if found.filled is None else found.filled.least
    named = tuple(one.sizes[-3] for one in taken.operands[:2])
    inputs = taken.inputs if found.ignored is None else (*taken.inputs, found.ignored)
    return Proposal(
        inputs, (taken.result.node,), builds, named, sums_rows=True,
        assumed=Assumed(OPTION, found.node, least, taken.order, taken.result.order),
    )  # fmt: skip


def _changed(proposal: Proposal, found: ReadAttention) -> Change:
    """The call of torch's own attention; its inputs are those of the proposal."""
    mask = "" if len(found.inputs) == 3 else f", attn_mask={found.filled.argument if found.filled else 'mask'}"
    line = f"y = torch.nn.functional.scaled_dot_product_attention(q, k, v{mask}, scale=scale)"
    line += found.filled.remark if found.filled else ""
    return Change(proposal, "scaled_dot_product_attention", _as_torch_has_it(found), _CALL, line)


FORM = _SoftmaxAttention()
DECLARED = _SoftmaxAttention(declared=True)
