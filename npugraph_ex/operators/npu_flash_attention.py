"""Attention of the ATB library of whole sequences, packed: masked, unmasked, causal, and with a prefix in a paged cache.

Formula: ``_atb_attention``. Queries, keys and values [T, N, D] stand one sequence behind the other, ``seq_len`` rows each.
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._atb_attention import HeadCounts, Mask, attend_packed, causal, given_mask
from npugraph_ex.operators._precision import HALVES, unsupported
from npugraph_ex.operators._record import Call, Operator, call
from npugraph_ex.operators.npu_paged_attention import cached_pairs


def _packed(
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    seq_len: torch.Tensor,
    heads: HeadCounts,
    out: torch.Tensor,
    mask: Mask | None = None,
) -> None:
    lengths = seq_len.tolist()
    query, keys, values = operands
    ends = [sum(lengths[: b + 1]) for b in range(len(lengths))]

    def pair(b: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = slice(ends[b] - lengths[b], ends[b])
        return keys[rows], values[rows]

    attend_packed(query, lengths, pair, heads, out, mask)


def _example(*masks: torch.Tensor) -> Call:
    operands = (torch.randn(5, heads, 16).half() for heads in (2, 1, 1))
    lengths = torch.tensor([2, 3], dtype=torch.int32)
    return call(*operands, *masks, lengths, 0.25, 2, 1, out=torch.zeros(5, 2, 16).half())


@Operator(
    name="atb::_npu_flash_attention",
    source="op-plugin, ops/atb/SelfAttentionAtb.cpp; ATB library, SelfAttention, MASK_TYPE_NORM",
    dtypes=HALVES,
    host_arguments=("seq_len",),
    examples=(lambda: _example(torch.full((3, 3), -10000.0).triu(1).half()),),
)
def npu_flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    seq_len: torch.Tensor,
    scale_value: float,
    num_heads: int,
    num_kv_heads: int,
    out: torch.Tensor,
) -> None:
    """``mask`` [S, S] or [B, S, S], S the longest sequence; ``out`` [T, N, Dv], where Dv may differ from D."""
    _packed((query, key, value), seq_len, HeadCounts(num_heads, num_kv_heads, scale_value), out, given_mask(mask))


@Operator(
    name="atb::_npu_flash_attention_v3",
    source="op-plugin, ops/atb/SelfAttentionAtbV3.cpp; ATB library, SelfAttention, MASK_TYPE_NORM_COMPRESS",
    dtypes=HALVES,
    host_arguments=("seq_len",),
    examples=(lambda: _example(torch.ones(128, 128).triu(1).half()),),
)
def npu_flash_attention_v3(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    seq_len: torch.Tensor,
    scale_value: float,
    num_heads: int,
    num_kv_heads: int,
    *,
    mask_type: int | None = 3,
    out: torch.Tensor,
) -> None:
    """Causal: ``mask`` [128, 128] is only the tile that the kernel lays along the diagonal."""
    if mask_type not in {None, 3}:
        raise unsupported("_npu_flash_attention_v3", "mask_type", mask_type, "3, a compressed causal mask")
    _packed((query, key, value), seq_len, HeadCounts(num_heads, num_kv_heads, scale_value), out, causal)


@Operator(
    name="atb::_npu_flash_attention_unpad",
    source="op-plugin, ops/atb/SelfAttentionUnpadAtb.cpp; ATB library, SelfAttention, MASK_TYPE_UNDEFINED",
    dtypes=HALVES,
    host_arguments=("seq_len",),
    examples=(_example,),
)
def npu_flash_attention_unpad(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seq_len: torch.Tensor,
    scale_value: float,
    num_heads: int,
    num_kv_heads: int,
    out: torch.Tensor,
) -> None:
    """Without a mask: each row sees its whole sequence."""
    _packed((query, key, value), seq_len, HeadCounts(num_heads, num_kv_heads, scale_value), out)


@Operator(
    name="atb::_npu_flash_attention_unpad_v2",
    source="op-plugin, ops/atb/SelfAttentionUnpadAtbV2.cpp; ATB library, SelfAttention, MASK_TYPE_UNDEFINED",
    dtypes=HALVES,
    host_arguments=("seq_len",),
    examples=(_example,),
)
def npu_flash_attention_unpad_v2(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seq_len: torch.Tensor,
    scale_value: float,
    num_heads: int,
    num_kv_heads: int,
    *,
    kernel_type: int | None = 0,
    out: torch.Tensor,
) -> None:
    """As ``_npu_flash_attention_unpad``; ``kernel_type`` 0 or 2 chooses among kernels of one meaning."""
    if kernel_type not in {None, 0, 2}:
        raise unsupported("_npu_flash_attention_unpad_v2", "kernel_type", kernel_type, "0 and 2")
    _packed((query, key, value), seq_len, HeadCounts(num_heads, num_kv_heads, scale_value), out)


def _prefix_example() -> Call:
    caches = (torch.randn(6, 4, 1, 16).half() for _ in range(2))
    tables = torch.tensor([[3, 0], [1, 5]], dtype=torch.int32)
    lengths, cached = torch.tensor([2, 3], dtype=torch.int32), torch.tensor([5, 8], dtype=torch.int32)
    mask, out = torch.ones(128, 128).triu(1).half(), torch.zeros(5, 2, 16).half()
    return call(torch.randn(5, 2, 16).half(), *caches, tables, mask, lengths, cached, 1, 2, 0.25, out)


@Operator(
    name="atb::_npu_flash_attention_qlens",
    source="op-plugin, ops/atb/SelfAttentionQlensAtb.cpp; ATB library, SelfAttention, PREFIX_ENCODER",
    dtypes=HALVES,
    host_arguments=("seq_len", "context_lens"),
    examples=(_prefix_example,),
)
def npu_flash_attention_qlens(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    mask: torch.Tensor,
    seq_len: torch.Tensor,
    context_lens: torch.Tensor,
    num_kv_heads: int,
    num_heads: int,
    scale_value: float,
    out: torch.Tensor,
) -> None:
    """Causal over a paged cache [blocks, size, Nkv, D] that holds the prefix and the rows of the query: ``context_lens`` in all."""
    heads = HeadCounts(num_heads, num_kv_heads, scale_value)
    cached = cached_pairs((key_cache, value_cache), block_table, context_lens.tolist(), query, heads)
    attend_packed(query, seq_len.tolist(), cached, heads, out, causal)
