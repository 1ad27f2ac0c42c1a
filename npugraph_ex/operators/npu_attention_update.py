"""Attention results over parts of the keys, merged: many at once, and the next into the sum so far (ring attention).

Formulas (operator documentation of ``torch_npu.npu_attention_update``; op-plugin's tests of it and of
``npu_ring_attention_update``)::

    lse    = log(sum_i exp(lse_i))              output = sum_i exp(lse_i - lse) output_i

A part whose lse is +inf counts nothing: fused attention gives that for a row without keys, and its callers merge such parts as they
are (vLLM-Ascend: a prompt without cached tokens beside one that has some). The documents do not say so: assumed. ::

    maximum = max(maximum_1, maximum_2)         sum = sum_i exp(maximum_i - maximum) sum_i
    output  = sum_i output_i exp(maximum_i - maximum) sum_i / sum
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from npugraph_ex.operators._alike import Alike
from npugraph_ex.operators._precision import HALVES, compute_dtype, refused, unsupported
from npugraph_ex.operators._record import Call, Operator, call


def _example() -> Call:
    return call([torch.randn(3) for _ in range(2)], [torch.randn(3, 8).half() for _ in range(2)], 1)


@Operator(
    name="npu::npu_attention_update",
    source="operator documentation of torch_npu.npu_attention_update",
    dtypes=(torch.float32,),
    examples=(_example,),
)
def npu_attention_update(
    lse: Sequence[torch.Tensor], local_out: Sequence[torch.Tensor], update_type: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(output, lse)``: [T, D] in its dtype, and [T] float32, zeros for ``update_type`` 0, which leaves it unwritten."""
    if update_type not in {0, 1}:
        raise refused("npu_attention_update", "update_type", update_type, "0 or 1")
    dtype = compute_dtype(*lse, *local_out)
    parts = torch.stack([part.to(dtype) for part in lse])
    parts = parts.masked_fill(parts == torch.inf, -torch.inf)
    whole = parts.logsumexp(0)
    seen = whole != -torch.inf
    shares = torch.exp(parts - whole.where(seen, 0.0)).unsqueeze(-1)
    output = (shares * torch.stack([part.to(dtype) for part in local_out])).sum(0)
    merged = whole.where(seen, torch.inf).to(lse[0].dtype)
    return output.to(local_out[0].dtype), merged if update_type else torch.zeros_like(merged)


def _ring_example() -> Call:
    def block() -> tuple[torch.Tensor, ...]:
        statistics = (torch.rand(2, 2, 3, 1).expand(-1, -1, -1, 8).contiguous() + 0.5 for _ in range(2))
        return torch.randn(3, 2, 8).half(), *statistics

    return call(*block(), *block())


@Operator(
    name="npu::npu_ring_attention_update",
    source="op-plugin's test of npu_ring_attention_update; CANN operator documentation, aclnnRingAttentionUpdate",
    covers={"input_softmax_layout": ("", "SBH", "TND")},
    dtypes=(*HALVES, torch.float32),
    alike=Alike(shape=("prev_attn_out", "cur_attn_out"), dtype=("prev_attn_out", "cur_attn_out")),
    examples=(_ring_example,),
)
def npu_ring_attention_update(
    prev_attn_out: torch.Tensor,
    prev_softmax_max: torch.Tensor,
    prev_softmax_sum: torch.Tensor,
    cur_attn_out: torch.Tensor,
    cur_softmax_max: torch.Tensor,
    cur_softmax_sum: torch.Tensor,
    *,
    actual_seq_qlen: torch.Tensor | None = None,
    input_layout: str = "SBH",
    input_softmax_layout: str = "",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(output, maximum, sum)``: [S, B, H] or [T, N, D], and [B, N, S, 8] or [T, N, 8] in float32.

    In layout TND with ``input_softmax_layout`` SBH the memory of each sequence's statistics is [N, S, 8].
    """
    if input_layout not in {"SBH", "TND"}:
        raise unsupported("npu_ring_attention_update", "input_layout", input_layout, "'SBH' and 'TND'")
    dtype = compute_dtype(prev_attn_out, prev_softmax_max)
    largest = torch.maximum(prev_softmax_max, cur_softmax_max)
    pairs = ((prev_attn_out, prev_softmax_max, prev_softmax_sum), (cur_attn_out, cur_softmax_max, cur_softmax_sum))
    sums = [total.to(dtype) * torch.exp(maximum.to(dtype) - largest.to(dtype)) for _, maximum, total in pairs]
    whole = sums[0] + sums[1]
    output = torch.zeros_like(prev_attn_out, dtype=dtype)
    for (part, _, _), total in zip(pairs, sums, strict=True):
        share = (total / whole)[..., :1]
        if input_layout == "SBH":
            share = share.permute(2, 0, 1, 3)
            heads = part.to(dtype).unflatten(-1, (share.shape[2], -1))
            output += (heads * share).flatten(-2)
        else:
            output += part.to(dtype) * _by_row(share, total, actual_seq_qlen, input_softmax_layout)
    return output.to(prev_attn_out.dtype), largest, whole.to(prev_softmax_sum.dtype)


def _by_row(
    share: torch.Tensor, statistics: torch.Tensor, ends: torch.Tensor | None, softmax_layout: str
) -> torch.Tensor:
    """The shares as [T, N, 1]."""
    if softmax_layout != "SBH" or ends is None:
        return share
    rows = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
    heads, width = statistics.shape[1:]
    each = [part.reshape(heads, -1, 1).transpose(0, 1) for part in share.expand(-1, -1, width)[..., :1].split(rows)]
    return torch.cat(each)
