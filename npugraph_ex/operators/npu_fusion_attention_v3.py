"""Attention of training. The formula and its limits are in ``_training_attention``."""

from __future__ import annotations

from typing import Any

import torch

from npugraph_ex.operators._record import Operator, call
from npugraph_ex.operators._training_attention import (
    NO_LIMIT,
    dropped,
    excluded,
    expanded,
    exponentials,
    operands,
    refuse,
    scores,
    stored,
)

_REPLICAS = 8  # the softmax statistics are stored eight times over, one 32-byte block of float32 a row


def _drops(*args: object, **kwargs: Any) -> bool:
    """Whether a call of the operator takes numbers from the generator: where it drops something."""
    return (args[9] if len(args) > 9 else kwargs.get("keep_prob", 1.0)) != 1.0


def _drawn(keep_prob: float) -> torch.Tensor:
    """What decides which weights are dropped: one number [1], int64; 0 where none is."""
    return torch.zeros(1, dtype=torch.int64) if keep_prob == 1.0 else torch.randint(2**62, (1,))


@Operator(
    name="npu::npu_fusion_attention_v3",
    source="operator documentation of torch_npu.npu_fusion_attention",
    draws_random_numbers=_drops,
    examples=(lambda: call(*(torch.randn(2, 2, 4, 16).half() for _ in range(3)), 2, "BNSD"),),
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
    pre_tockens: int = NO_LIMIT,
    next_tockens: int = NO_LIMIT,
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
    refuse(operator, input_layout, keep_prob, prefix, actual_seq_qlen, actual_seq_kvlen, padding_mask, sink)
    q, k, v = operands(query, key, value, head_num, input_layout)
    number = _drawn(keep_prob)
    logits = scores(q, k, pse, scale, excluded(operator, atten_mask, sparse_mode, pre_tockens, next_tockens, q, k))
    maximum = logits.amax(-1, keepdim=True)
    weights = exponentials(logits, maximum)
    total = weights.sum(-1, keepdim=True)
    kept = dropped(torch.nan_to_num(weights / total), keep_prob, number)
    output = stored(kept @ expanded(v, q), query, input_layout)
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
