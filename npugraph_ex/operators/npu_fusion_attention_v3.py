"""Attention of training: `npu_fusion_attention_v3` and its gradient.

Formula (operator documentation of ``torch_npu.npu_fusion_attention``)::

    scores = mask(scale * (Q K^T + pse), atten_mask)
    P      = softmax(scores)
    output = D(P) V

and, with dO the gradient of the output::

    dV = D(P)^T dO    dP = D(dO V^T)    dS = P * (dP - rowsum(dO * output))    dQ = scale dS K    dK = scale dS^T Q

D is dropout: it keeps an element with probability ``keep_prob`` and divides it by that, and makes the others 0. Which elements,
the result ``seed`` tells, a draw from torch's generator; the gradient takes it and drops the same ones.

``atten_mask`` is true where a score is *excluded*. Torch's ``scaled_dot_product_attention`` arrives here on an NPU.
Not covered: variable-length layouts, prefix masks, learnable sinks.
"""

from __future__ import annotations

from typing import Any

import torch

from npugraph_ex.operators._precision import compute_dtype, unsupported
from npugraph_ex.operators._record import Call, Operator, call

_LAYOUTS = ("BSH", "SBH", "BSND", "BNSD")
_REPLICAS = 8  # the softmax statistics are stored eight times over, one 32-byte block of float32 a row
_NO_LIMIT = 2147483647


def _operands_of_an_example(count: int) -> list[torch.Tensor]:
    return [torch.randn(2, 2, 4, 16).half() for _ in range(count)]


@Operator(
    name="npu::npu_fusion_attention_v3",
    source="operator documentation of torch_npu.npu_fusion_attention",
    examples=(lambda: call(*_operands_of_an_example(3), 2, "BNSD"),),
)
def npu_fusion_attention_v3(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    head_num: int,
    input_layout: str,
    pse: torch.Tensor | None = None,
    padding_mask: torch.Tensor | None = None,
    atten_mask: torch.Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = _NO_LIMIT,
    next_tockens: int = _NO_LIMIT,
    inner_precise: int = 0,
    prefix: list[int] | None = None,
    actual_seq_qlen: torch.Tensor | None = None,
    actual_seq_kvlen: torch.Tensor | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """(output like ``query``, row maxima, row sums (both [B, N, Sq, 8], float32), an empty tensor, seed, offset)."""
    operator = "npu_fusion_attention_v3"
    _refuse(operator, input_layout, keep_prob, prefix, actual_seq_qlen, actual_seq_kvlen, padding_mask, sink)
    q, k, v = _operands(query, key, value, head_num, input_layout)
    number = _drawn(keep_prob)
    scores = _scores(q, k, pse, scale, _excluded(operator, atten_mask, sparse_mode, pre_tockens, next_tockens, q, k))
    maximum = scores.amax(-1, keepdim=True)
    weights = _exponentials(scores, maximum)
    total = weights.sum(-1, keepdim=True)
    kept = _dropped(torch.nan_to_num(weights / total), keep_prob, number)
    output = _stored(kept @ _expanded(v, q), query, input_layout)
    statistic = torch.float64 if query.dtype == torch.float64 else torch.float32
    rows = (*maximum.shape[:-1], _REPLICAS)
    return (
        output,
        maximum.to(statistic).expand(rows).contiguous(),
        total.to(statistic).expand(rows).contiguous(),
        query.new_empty(0),
        number,
        torch.zeros_like(number),
    )


def _example_of_gradients() -> Call:
    query, key, value, dy, output = _operands_of_an_example(5)
    _, largest, total, _, seed, offset = npu_fusion_attention_v3(query, key, value, 2, "BNSD")
    saved = {"softmax_max": largest, "softmax_sum": total, "attention_in": output}
    return call(query, key, value, dy, 2, "BNSD", **saved, seed=seed, offset=offset)


@Operator(
    name="npu::npu_fusion_attention_grad_v3",
    source="operator documentation of torch_npu.npu_fusion_attention",
    examples=(_example_of_gradients,),
)
def npu_fusion_attention_grad_v3(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dy: torch.Tensor,
    head_num: int,
    input_layout: str,
    *,
    pse: torch.Tensor | None = None,
    padding_mask: torch.Tensor | None = None,
    atten_mask: torch.Tensor | None = None,
    softmax_max: torch.Tensor | None = None,
    softmax_sum: torch.Tensor | None = None,
    softmax_in: torch.Tensor | None = None,
    attention_in: torch.Tensor | None = None,
    scale_value: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = _NO_LIMIT,
    next_tockens: int = _NO_LIMIT,
    inner_precise: int = 0,
    seed: torch.Tensor | None = None,
    offset: torch.Tensor | None = None,
    prefix: list[int] | None = None,
    actual_seq_qlen: torch.Tensor | None = None,
    actual_seq_kvlen: torch.Tensor | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """Gradients of query, key, value; then those of ``pse`` and ``sink``, which are not computed: empty, and 0 in float32."""
    operator = "npu_fusion_attention_grad_v3"
    _refuse(operator, input_layout, keep_prob, prefix, actual_seq_qlen, actual_seq_kvlen, padding_mask, sink)
    q, k, v = _operands(query, key, value, head_num, input_layout)
    gradient = _heads(dy, head_num, input_layout)
    excluded = _excluded(operator, atten_mask, sparse_mode, pre_tockens, next_tockens, q, k)
    scores = _scores(q, k, pse, scale_value, excluded)
    weights = _exponentials(scores, scores.amax(-1, keepdim=True))
    weights = torch.nan_to_num(weights / weights.sum(-1, keepdim=True))
    wide_k, wide_v = _expanded(k, q), _expanded(v, q)
    to_weights = _dropped(gradient @ wide_v.mT, keep_prob, seed)
    to_scores = weights * (to_weights - (to_weights * weights).sum(-1, keepdim=True)) * scale_value
    return (
        _stored(to_scores @ wide_k, query, input_layout),
        _stored(_folded(to_scores.mT @ q, k), key, input_layout),
        _stored(_folded(_dropped(weights, keep_prob, seed).mT @ gradient, v), value, input_layout),
        query.new_empty(0),
        torch.zeros(()),
    )


def draws_random_numbers(*args: object, **kwargs: Any) -> bool:
    """Whether a call of the operator takes numbers from the generator: where it drops something."""
    return (args[9] if len(args) > 9 else kwargs.get("keep_prob", 1.0)) != 1.0


def _drawn(keep_prob: float) -> torch.Tensor:
    """What decides which weights are dropped: one number [1], int64; 0 where none is."""
    return torch.zeros(1, dtype=torch.int64) if keep_prob == 1.0 else torch.randint(2**62, (1,))


def _dropped(weights: torch.Tensor, keep_prob: float, seed: torch.Tensor | None) -> torch.Tensor:
    """``weights`` [B, N, Sq, Skv] with some of them 0 and the others divided by ``keep_prob``."""
    if keep_prob == 1.0:
        return weights
    if seed is None:
        raise ValueError(
            "npu_fusion_attention_grad_v3: with keep_prob below 1 it needs the seed that the forward gave."
        )
    generator = torch.Generator().manual_seed(int(seed.reshape(-1)[0]))
    kept = torch.rand(weights.shape, generator=generator) < keep_prob
    return torch.where(kept, weights / keep_prob, 0.0)


npu_fusion_attention_v3.draws_random_numbers = draws_random_numbers  # type: ignore[attr-defined]


def _refuse(operator: str, layout: str, keep_prob: float, *others: object) -> None:
    if layout not in _LAYOUTS:
        raise unsupported(operator, "input_layout", layout, "BSH, SBH, BSND and BNSD")
    if not 0.0 < keep_prob <= 1.0:
        raise ValueError(f"{operator}: keep_prob must be above 0 and at most 1; it is {keep_prob}.")
    names = ("prefix", "actual_seq_qlen", "actual_seq_kvlen", "padding_mask", "sink")
    for name, given in zip(names, others, strict=True):
        if given is not None:
            raise unsupported(operator, name, "a value", "None")


def _operands(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, head_num: int, layout: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value by heads; where their dimension is joined with D, the key has as many as make them as wide."""
    shared = max(key.shape[-1] * head_num // max(query.shape[-1], 1), 1)
    return _heads(query, head_num, layout), _heads(key, shared, layout), _heads(value, shared, layout)


def _heads(operand: torch.Tensor, heads: int, layout: str) -> torch.Tensor:
    """``operand`` as [B, N, S, D] in the precision of the computation; ``heads`` counts where a layout does not tell."""
    operand = operand.to(compute_dtype(operand))
    if layout == "BNSD":
        return operand
    if layout == "BSND":
        return operand.transpose(1, 2)
    if layout == "SBH":
        operand = operand.transpose(0, 1)
    parts: torch.Tensor = operand.unflatten(-1, (heads, -1))
    return parts.transpose(1, 2)


def _stored(heads: torch.Tensor, like: torch.Tensor, layout: str) -> torch.Tensor:
    """[B, N, S, D] in the layout and dtype of ``like``."""
    if layout != "BNSD":
        heads = heads.transpose(1, 2)
        if layout != "BSND":
            heads = heads.flatten(2)
        if layout == "SBH":
            heads = heads.transpose(0, 1)
    return heads.to(like.dtype).contiguous()


def _expanded(kv: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Each key or value head repeated for the query heads that share it (grouped-query attention)."""
    return kv.repeat_interleave(q.shape[1] // kv.shape[1], dim=1)


def _folded(wide: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    """The gradients of a shared head, added up."""
    shared: torch.Tensor = wide.unflatten(1, (kv.shape[1], -1))
    return shared.sum(2)


def _exponentials(scores: torch.Tensor, maximum: torch.Tensor) -> torch.Tensor:
    """``exp(scores - maximum)``, and 0 in a row that is excluded altogether."""
    return torch.where(maximum.isinf() & (maximum < 0), 0.0, torch.exp(scores - maximum))


def _scores(
    q: torch.Tensor, k: torch.Tensor, pse: torch.Tensor | None, scale: float, excluded: torch.Tensor | None
) -> torch.Tensor:
    scores = q @ _expanded(k, q).mT
    if pse is not None:
        scores = scores + pse.to(scores.dtype)
    scores = scores * scale
    return scores if excluded is None else scores.masked_fill(excluded, -torch.inf)


def _excluded(
    operator: str,
    mask: torch.Tensor | None,
    sparse_mode: int,
    before: int,
    after: int,
    q: torch.Tensor,
    k: torch.Tensor,
) -> torch.Tensor | None:
    """Where a score is left out: the whole mask given (modes 0, 1), causal from the left (2) or the right (3), a band (4)."""
    rows, columns = q.shape[-2], k.shape[-2]
    distance = torch.arange(columns) - torch.arange(rows).unsqueeze(-1)
    if sparse_mode == 2:
        return distance > 0
    if sparse_mode == 3:
        return distance > columns - rows
    if sparse_mode == 4:
        shifted = distance - (columns - rows)
        return (shifted > after) | (shifted < -before)
    if sparse_mode not in {0, 1}:
        raise unsupported(operator, "sparse_mode", sparse_mode, "0 to 4")
    if mask is None:
        return None
    excluded = mask.bool()
    if sparse_mode == 0 and (before < rows or after < columns):
        excluded = excluded | (distance > after) | (distance < -before)
    return excluded
