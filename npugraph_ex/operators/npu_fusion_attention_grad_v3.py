"""The gradients of attention of training. The formula and its limits are in ``_training_attention``."""

from __future__ import annotations

import torch

from npugraph_ex.operators._record import Call, Operator, call
from npugraph_ex.operators._training_attention import (
    NO_LIMIT,
    dropped,
    excluded,
    expanded,
    exponentials,
    folded,
    heads,
    operands,
    refuse,
    scores,
    stored,
)
from npugraph_ex.operators.npu_fusion_attention_v3 import npu_fusion_attention_v3


def _example() -> Call:
    query, key, value, dy, output = (torch.randn(2, 2, 4, 16).half() for _ in range(5))
    _, largest, total, _, seed, offset = npu_fusion_attention_v3(query, key, value, 2, "BNSD")
    saved = {"softmax_max": largest, "softmax_sum": total, "attention_in": output}
    return call(query, key, value, dy, 2, "BNSD", **saved, seed=seed, offset=offset)


@Operator(
    name="npu::npu_fusion_attention_grad_v3",
    source="operator documentation of torch_npu.npu_fusion_attention",
    examples=(_example,),
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
    pre_tockens: int = NO_LIMIT,
    next_tockens: int = NO_LIMIT,
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
    refuse(operator, input_layout, keep_prob, prefix, actual_seq_qlen, actual_seq_kvlen, padding_mask, sink)
    q, k, v = operands(query, key, value, head_num, input_layout)
    gradient = heads(dy, head_num, input_layout)
    left_out = excluded(operator, atten_mask, sparse_mode, pre_tockens, next_tockens, q, k)
    logits = scores(q, k, pse, scale_value, left_out)
    weights = exponentials(logits, logits.amax(-1, keepdim=True))
    weights = torch.nan_to_num(weights / weights.sum(-1, keepdim=True))
    wide_k, wide_v = expanded(k, q), expanded(v, q)
    to_weights = dropped(gradient @ wide_v.mT, keep_prob, seed)
    to_scores = weights * (to_weights - (to_weights * weights).sum(-1, keepdim=True)) * scale_value
    return (
        stored(to_scores @ wide_k, query, input_layout),
        stored(folded(to_scores.mT @ q, k), key, input_layout),
        stored(folded(dropped(weights, keep_prob, seed).mT @ gradient, v), value, input_layout),
        query.new_empty(0),
        torch.zeros(()),
    )
