"""Attention of the ATB library over a quantised paged cache, one query row for each sequence.

Formula (ATB library, PagedAttention; op-plugin's test of ``_npu_paged_attention_quant``). With ``quant_type`` 1 the int8 keys and
values are multiplied by ``k_descale`` and ``v_descale`` [Nkv * D], then as in ``_npu_paged_attention``. With ``quant_type`` 3 the
query is int8 as well, descales are [N], and the weights are quantised row by row::

    scores = Q K^T * k_descale[n] * scale
    weights = exp(scores - max(scores))
    output = round(127 * weights) V * v_descale[n] / (127 * sum(weights))
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._atb_attention import HeadCounts, attend_packed
from npugraph_ex.operators._attention import shared_heads
from npugraph_ex.operators._precision import HALVES, compute_dtype, unsupported
from npugraph_ex.operators._record import Call, Operator, call
from npugraph_ex.operators.npu_paged_attention import cached_pairs

_DEQUANTISED, _ONLINE = 1, 3


def _example(kind: int) -> Call:
    caches = (torch.randint(-9, 9, (6, 4, 1, 16), dtype=torch.int8) for _ in range(2))
    query = torch.randint(-9, 9, (2, 2, 16), dtype=torch.int8) if kind == _ONLINE else torch.randn(2, 2, 16).half()
    tables, lengths = torch.tensor([[3, 0], [1, 5]], dtype=torch.int32), torch.tensor([5, 8], dtype=torch.int32)
    descales = (torch.rand(2 if kind == _ONLINE else 16) for _ in range(2))
    return call(query, *caches, 1, 2, 0.25, tables, lengths, kind, 1, *descales, torch.zeros(2, 2, 16).half())


@Operator(
    name="atb::_npu_paged_attention_quant",
    source="op-plugin, ops/atb/Fa3Atb.cpp and its test; ATB library, PagedAttention",
    covers={"outdata_type": (1, 27)},
    dtypes=HALVES,
    host_arguments=("context_lens",),
    examples=(lambda: _example(_DEQUANTISED), lambda: _example(_ONLINE)),
)
def npu_paged_attention_quant(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    num_kv_heads: int,
    num_heads: int,
    scale_value: float,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    quant_type: int,
    outdata_type: int,
    k_descale: torch.Tensor,
    v_descale: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Query [B, N, D], int8 caches [blocks, size, Nkv, D]; ``out`` in the dtype that ``outdata_type`` names."""
    lengths = context_lens.tolist()
    heads = HeadCounts(num_heads, num_kv_heads, scale_value)
    cached = cached_pairs((key_cache, value_cache), block_table, lengths, query, heads)
    dtype = compute_dtype(k_descale, v_descale)
    if quant_type == _DEQUANTISED:
        factors = [descale.to(dtype).reshape(num_kv_heads, -1) for descale in (k_descale, v_descale)]

        def dequantised(b: int) -> tuple[torch.Tensor, torch.Tensor]:
            key, value = cached(b)
            return key.to(dtype) * factors[0], value.to(dtype) * factors[1]

        attend_packed(query, [1] * len(lengths), dequantised, heads, out)
    elif quant_type == _ONLINE:
        descales = [descale.to(dtype).reshape(num_heads, 1, 1) for descale in (k_descale, v_descale)]
        for b, length in enumerate(lengths):
            if length:
                k, v = (shared_heads(part.to(dtype).transpose(0, 1), num_heads) for part in cached(b))
                scores = query[b].to(dtype).unsqueeze(1) @ k.mT * descales[0] * scale_value
                weights = torch.exp(scores - scores.amax(-1, keepdim=True))
                output = (weights * 127).round() @ v * descales[1] / (127 * weights.sum(-1, keepdim=True))
                out[b] = output.reshape(out[b].shape).to(out.dtype)
    else:
        raise unsupported("_npu_paged_attention_quant", "quant_type", quant_type, "1 and 3")
