"""Attention of the ATB library of whole sequences, packed: masked, unmasked, causal, and with a prefix in a paged cache.

Formula: ``_atb_attention``. Queries, keys and values [T, N, D] stand one sequence behind the other, ``seq_len`` rows each. With
slopes, a key at distance d before its query adds ``slope * d`` to the scores of a head, or ``slope * sqrt(d)``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from npugraph_ex.operators._atb_attention import (
    HeadCounts,
    Mask,
    attend_packed,
    causal,
    distances,
    given_mask,
    mask_of_heads,
)
from npugraph_ex.operators._precision import HALVES, refused, unsupported
from npugraph_ex.operators._record import Call, Operator, call
from npugraph_ex.operators.npu_paged_attention import cached_pairs


def _packed(
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    seq_len: torch.Tensor | Sequence[int],
    heads: HeadCounts,
    out: torch.Tensor,
    mask: Mask | None = None,
) -> None:
    lengths = [int(length) for length in seq_len]
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


def _tile(power: float = 1.0) -> torch.Tensor:
    """The distances within 128 positions, or their powers, below a diagonal of large numbers."""
    rows = torch.arange(128.0)
    return ((rows[:, None] - rows).clamp(min=0) ** power + torch.full((128, 128), 60000.0).triu(1)).half()


def _alibi_example(**how: torch.Tensor | int) -> Call:
    operands = (torch.randn(5, heads, 16).half() for heads in (2, 1, 1))
    return call(
        *operands, [2, 3], scale_value=0.25, num_heads=2, num_kv_heads=1, out=torch.zeros(5, 2, 16).half(), **how
    )


def _prefix_with(**how: torch.Tensor | int) -> Call:
    query, keys, values, tables, *_, out = _prefix_example().args
    heads = {"num_kv_heads": 1, "num_heads": 2, "scale_value": 0.25, "out": out}
    return call(query, keys, values, tables, _tile(0.5), [2, 3], [5, 8], **heads, **how)


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


_NORM, _ALIBI, _CAUSAL, _SLOPES, _ROOTS = range(1, 6)
"""MASK_TYPE_NORM, _ALIBI, _NORM_COMPRESS, _ALIBI_COMPRESS and _ALIBI_COMPRESS_SQRT of the ATB library."""


def _sloped(operator: str, mask_type: int, mask: torch.Tensor | None, slopes: torch.Tensor | None) -> Mask:
    """A causal mask by distance; ``mask`` is the tile of distances, or of their roots, that the kernel lays over the scores."""
    if mask is None or slopes is None:
        raise refused(operator, "mask and slopes", None, f"tensors with mask_type {mask_type}")
    return distances(operator, mask, slopes, root=mask_type == _ROOTS)


@Operator(
    name="atb::_npu_flash_attention_v2.out",
    source="op-plugin, ops/atb/SelfAttentionAtbV2.cpp and its test; ATB library, SelfAttention, PA_ENCODER",
    dtypes=HALVES,
    host_arguments=("seq_len",),
    examples=(
        lambda: _alibi_example(mask=torch.randn(2, 3, 3).half()),
        lambda: _alibi_example(mask=_tile(), mask_type=4, slopes=torch.tensor([-0.5, -0.25])),
    ),
)
def npu_flash_attention_v2(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seq_len: Sequence[int],
    *,
    mask: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
    kernel_type: int = 0,
    mask_type: int = 2,
    scale_value: float = 1.0,
    num_heads: int = 0,
    num_kv_heads: int = 0,
    out: torch.Tensor,
) -> torch.Tensor:
    """``out`` itself. ``mask`` with mask_type 1 is [S, S] or [B, S, S], with 2 [N, S, S] or [B, N, S, S], with 4 and 5 a tile."""
    name = "_npu_flash_attention_v2"
    if kernel_type not in {0, 1}:
        raise unsupported(name, "kernel_type", kernel_type, "0 and 1, kernels of one meaning")
    if mask_type in {_NORM, _ALIBI}:
        if mask is None:
            raise refused(name, "mask", None, f"a tensor with mask_type {mask_type}")
        chosen = given_mask(mask) if mask_type == _NORM else mask_of_heads(mask)
    elif mask_type in {_SLOPES, _ROOTS}:
        chosen = _sloped(name, mask_type, mask, slopes)
    else:
        raise unsupported(name, "mask_type", mask_type, "1, 2, 4 and 5")
    _packed((query, key, value), seq_len, HeadCounts(num_heads, num_kv_heads, scale_value), out, chosen)
    return out


@Operator(
    name="atb::_npu_flash_attention_prefix_v2.out",
    source="op-plugin, ops/atb/SelfAttentionPrefixAtbV2.cpp and its test; ATB library, SelfAttention, PREFIX_ENCODER",
    dtypes=HALVES,
    host_arguments=("seq_len", "context_lens"),
    examples=(lambda: _prefix_with(mask_type=3), lambda: _prefix_with(mask_type=5, slopes=torch.tensor([-0.5, -0.25]))),
)
def npu_flash_attention_prefix_v2(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    mask: torch.Tensor,
    seq_len: Sequence[int],
    context_lens: Sequence[int],
    *,
    slopes: torch.Tensor | None = None,
    kernel_type: int = 1,
    mask_type: int = 3,
    num_kv_heads: int = 0,
    num_heads: int = 0,
    scale_value: float = 1.0,
    out: torch.Tensor,
) -> torch.Tensor:
    """``out`` itself; as ``_npu_flash_attention_qlens``, causal with mask_type 3, and by slopes with 4 and 5."""
    name = "_npu_flash_attention_prefix_v2"
    if kernel_type not in {0, 1}:
        raise unsupported(name, "kernel_type", kernel_type, "0 and 1, kernels of one meaning")
    if mask_type not in {_CAUSAL, _SLOPES, _ROOTS}:
        raise unsupported(name, "mask_type", mask_type, "3, 4 and 5")
    heads = HeadCounts(num_heads, num_kv_heads, scale_value)
    caches, lengths = (key_cache, value_cache), [int(length) for length in context_lens]
    cached = cached_pairs(caches, block_table, lengths, query, heads)
    chosen = causal if mask_type == _CAUSAL else _sloped(name, mask_type, mask, slopes)
    attend_packed(query, [int(length) for length in seq_len], cached, heads, out, chosen)
    return out
