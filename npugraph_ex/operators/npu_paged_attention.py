"""Attention of the ATB library over a paged cache: one query row for each sequence, several, and multi-head latent attention.

Formula: ``_atb_attention``. The cache of a sequence is read through its row of ``block_table`` as far as ``context_lens`` says.
With several rows (``splitfuse``) the rows of all sequences are packed, ``seq_len`` of each. A cache is [blocks, size, Nkv, D], or
[blocks, Nkv * D / E, size, E] in layout NZ, as on the chips of the 310P; its shape tells which.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from npugraph_ex.operators._atb_attention import HeadCounts, Mask, attend_packed, causal, packed_mask
from npugraph_ex.operators._paged_cache import is_split, read_sequence
from npugraph_ex.operators._precision import HALVES, unsupported
from npugraph_ex.operators._record import Call, Operator, call


def cached_pairs(
    caches: tuple[torch.Tensor, torch.Tensor],
    block_table: torch.Tensor,
    lengths: list[int],
    query: torch.Tensor,
    heads: HeadCounts,
) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    """For a sequence's number, its keys and values [S, Nkv, D], of NZ ones [S, Nkv * D / E, E]."""
    elements = query.shape[-1] if query.dim() > 2 else query.shape[-1] // max(heads.query, 1)
    split = is_split(caches[0], heads.cache or heads.query, elements)

    def pair(b: int) -> tuple[torch.Tensor, torch.Tensor]:
        key, value = (read_sequence(cache, block_table[b], lengths[b], split=split) for cache in caches)
        return key, value

    return pair


def _example() -> Call:
    keys, values = torch.randn(6, 4, 1, 16).half(), torch.randn(6, 4, 1, 16).half()
    tables, lengths = torch.tensor([[3, 0], [1, 5]], dtype=torch.int32), torch.tensor([5, 8], dtype=torch.int32)
    out = torch.zeros(2, 2, 16).half()
    return call(torch.randn(2, 2, 16).half(), keys, values, 1, 2, 0.25, tables, lengths, out)


@Operator(
    name="atb::_npu_paged_attention",
    source="operator documentation of torch_npu._npu_paged_attention; op-plugin, ops/atb/PagedAttentionAtb.cpp",
    dtypes=HALVES,
    host_arguments=("context_lens",),
    examples=(_example,),
)
def npu_paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    num_kv_heads: int,
    num_heads: int,
    scale_value: float,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    out: torch.Tensor,
    *,
    workspace: torch.Tensor | None = None,
) -> None:
    """Query [B, N, D], caches [blocks, size, Nkv, D]; one row for each sequence.

    float16 and bfloat16; lengths int32 on the host.
    """
    lengths = context_lens.tolist()
    heads = HeadCounts(num_heads, num_kv_heads, scale_value)
    cached = cached_pairs((key_cache, value_cache), block_table, lengths, query, heads)
    attend_packed(query, [1] * len(lengths), cached, heads, out)


def _latent_example() -> Call:
    cache, tables = torch.randn(6, 4, 1, 24).half(), torch.tensor([[3, 0], [1, 5]], dtype=torch.int32)
    lengths, out = torch.tensor([5, 8], dtype=torch.int32), torch.zeros(2, 2, 16).half()
    return call(torch.randn(2, 2, 24).half(), cache, 1, 2, 0.25, tables, lengths, 16, out)


@Operator(
    name="atb::_npu_paged_attention_mla",
    source="op-plugin, ops/atb/PagedAttentionMlaAtb.cpp; ATB library, PagedAttention",
    dtypes=HALVES,
    host_arguments=("context_lens",),
    examples=(_latent_example,),
)
def npu_paged_attention_mla(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    num_kv_heads: int,
    num_heads: int,
    scale_value: float,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    mla_vheadsize: int,
    out: torch.Tensor,
) -> None:
    """As ``_npu_paged_attention``; the values are the first ``mla_vheadsize`` elements of the keys."""
    npu_paged_attention(
        query,
        key_cache,
        key_cache[..., :mla_vheadsize],
        num_kv_heads,
        num_heads,
        scale_value,
        block_table,
        context_lens,
        out,
    )


def _packed_example(mask: torch.Tensor) -> Call:
    caches = (torch.randn(6, 4, 1, 16).half() for _ in range(2))
    tables, lengths = torch.tensor([[3, 0], [1, 5]], dtype=torch.int32), torch.tensor([5, 8], dtype=torch.int32)
    rows, out = torch.tensor([2, 1], dtype=torch.int32), torch.zeros(3, 2, 16).half()
    return call(torch.randn(3, 2, 16).half(), *caches, tables, lengths, mask, rows, 1, 2, 0.25, out=out)


@Operator(
    name="atb::_npu_paged_attention_splitfuse",
    source="op-plugin, ops/atb/PagedAttentionSplitfuse.cpp; ATB library, PagedAttention, MASK_TYPE_SPEC",
    dtypes=HALVES,
    host_arguments=("context_lens", "seq_len"),
    examples=(lambda: _packed_example(torch.randn(3, 8).half().clamp(max=0)),),
)
def npu_paged_attention_splitfuse(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    mask: torch.Tensor,
    seq_len: torch.Tensor,
    num_kv_heads: int,
    num_heads: int,
    scale_value: float,
    out: torch.Tensor,
) -> None:
    """Query [T, N, D]; ``mask`` [T, S] of the packed rows."""
    chosen = packed_mask(mask)
    _splitfuse(
        query,
        (key_cache, value_cache),
        block_table,
        (context_lens, seq_len),
        (num_heads, num_kv_heads, scale_value),
        out,
        chosen,
    )


@Operator(
    name="atb::_npu_paged_attention_splitfuse_v2",
    source="op-plugin, ops/atb/PagedAttentionSplitfuseV2.cpp; ATB library, PagedAttention, MASK_TYPE_NORM_COMPRESS",
    dtypes=HALVES,
    host_arguments=("context_lens", "seq_len"),
    examples=(lambda: _packed_example(torch.ones(128, 128).triu(1).half()),),
)
def npu_paged_attention_splitfuse_v2(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    mask: torch.Tensor,
    seq_len: torch.Tensor,
    num_kv_heads: int,
    num_heads: int,
    scale_value: float,
    *,
    mask_type: int | None = 5,
    out: torch.Tensor,
) -> None:
    """As ``_npu_paged_attention_splitfuse``, causal: ``mask`` [128, 128] is only the tile that the kernel repeats."""
    if mask_type not in {None, 5}:
        raise unsupported("_npu_paged_attention_splitfuse_v2", "mask_type", mask_type, "5, a compressed causal mask")
    _splitfuse(
        query,
        (key_cache, value_cache),
        block_table,
        (context_lens, seq_len),
        (num_heads, num_kv_heads, scale_value),
        out,
        causal,
    )


def _splitfuse(
    query: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    block_table: torch.Tensor,
    lengths: tuple[torch.Tensor, torch.Tensor],
    heads: tuple[int, int, float],
    out: torch.Tensor,
    mask: Mask,
) -> None:
    cached, rows = (length.tolist() for length in lengths)
    counts = HeadCounts(*heads)
    attend_packed(query, rows, cached_pairs(caches, block_table, cached, query, counts), counts, out, mask)


def _second_example() -> Call:
    query, keys, values, _, _, scale, tables, _, out = _example().args
    how = {"value_cache": values, "num_kv_heads": 1, "num_heads": 2, "scale_value": scale, "out": out}
    return call(query, keys, tables, [5, 8], mask=torch.randn(2, 1, 8).half(), mask_type=2, **how)


@Operator(
    name="atb::_npu_paged_attention_v2.out",
    source="op-plugin, ops/atb/PagedAttentionAtbV2.cpp; ATB library, PagedAttention, MASK_TYPE_ALIBI",
    dtypes=HALVES,
    host_arguments=("context_lens",),
    examples=(_second_example,),
)
def npu_paged_attention_v2(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: Sequence[int],
    *,
    value_cache: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    num_kv_heads: int = 0,
    num_heads: int = 0,
    scale_value: float = 1.0,
    mask_type: int = 0,
    workspace: torch.Tensor | None = None,
    out: torch.Tensor,
) -> torch.Tensor:
    """``out`` itself; with ``mask_type`` 2 (alibi) the mask [N, 1, S] or [B, N, 1, S] is added to the scores."""
    if mask_type not in {0, 2}:
        raise unsupported("_npu_paged_attention_v2", "mask_type", mask_type, "0, none, and 2, alibi")
    if value_cache is None:
        raise unsupported("_npu_paged_attention_v2", "value_cache", value_cache, "a tensor")
    lengths = [int(length) for length in context_lens]

    def alibi(b: int, first: int, rows: int, columns: int) -> tuple[torch.Tensor, None]:
        del first, rows
        if mask is None:
            raise ValueError("_npu_paged_attention_v2: mask_type 2 needs mask, which is None.")
        one = mask[b if mask.shape[0] > 1 else 0] if mask.dim() == 4 else mask
        return one[..., :columns], None

    heads = HeadCounts(num_heads, num_kv_heads, scale_value)
    cached = cached_pairs((key_cache, value_cache), block_table, lengths, query, heads)
    attend_packed(query, [1] * len(lengths), cached, heads, out, alibi if mask_type else None)
    return out
