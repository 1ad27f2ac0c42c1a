"""Puts tokens that came rank by rank in the order of the experts.

Formula (operator documentation of ``torch_npu.npu_moe_re_routing``), with ``n[r, e]`` tokens from rank r for expert e::

    given:   for each rank the tokens of its experts, one expert after the other
    results: for each expert the tokens of all ranks, one rank after the other
    permute_token_idx[i] = where the i-th result was given
    expert_token_num[e]  = sum over r of n[r, e]

Numbers that add up to more tokens than there are name rows that are left out. Without ``per_token_scales`` the device leaves the
second result unwritten; here it is zeros.

The tokens move as they are, whatever ``tokens_dtype`` says that their bytes stand for; so do the scales.

Not covered: ``expert_token_num_type`` other than 1, ``idx_type`` other than 0.
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._precision import unsupported
from npugraph_ex.operators._record import Operator, call

_NAME = "npu_moe_re_routing"


@Operator(
    name="npu::npu_moe_re_routing",
    source="operator documentation of torch_npu.npu_moe_re_routing",
    dtypes=(torch.float16, torch.bfloat16, torch.int8),
    examples=(lambda: call(torch.randn(7, 4).half(), torch.tensor([[1, 2], [3, 1]]), per_token_scales=torch.rand(7)),),
)
def npu_moe_re_routing(
    tokens: torch.Tensor,
    expert_token_num_per_rank: torch.Tensor,
    *,
    per_token_scales: torch.Tensor | None = None,
    expert_token_num_type: int = 1,
    idx_type: int = 0,
    tokens_dtype: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(permute_tokens, permute_per_token_scales, permute_token_idx, expert_token_num)``.

    tokens: [A, H]; expert_token_num_per_rank: [ranks, experts] int32 or int64; per_token_scales: [A] float32.
    """
    for name, value, only in (("expert_token_num_type", expert_token_num_type, 1), ("idx_type", idx_type, 0)):
        if value != only:
            raise unsupported(_NAME, name, value, repr(only))
    del tokens_dtype
    numbers = expert_token_num_per_rank.long()
    ranks, experts = numbers.shape
    # The sender's order numbers the parts rank by rank; sorted by (expert, rank) they are the result's.
    part = torch.arange(ranks * experts).repeat_interleave(numbers.reshape(-1))[: tokens.shape[0]]
    order = (part % experts * ranks + part // experts).argsort(stable=True)
    order = torch.cat([order, torch.arange(order.numel(), tokens.shape[0])])
    scales = torch.zeros(tokens.shape[0]) if per_token_scales is None else _taken(per_token_scales, order)
    return (
        _taken(tokens, order),
        scales,
        order.to(torch.int32),
        expert_token_num_per_rank.sum(0, dtype=expert_token_num_per_rank.dtype),
    )


def _taken(rows: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Rows in an order, as bytes, which every dtype has."""
    return rows.contiguous().view(torch.uint8)[order].view(rows.dtype) if rows.dim() > 1 else rows[order]
