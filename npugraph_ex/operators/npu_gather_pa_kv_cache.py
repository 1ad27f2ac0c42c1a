"""Keys and values of whole sequences, gathered from a paged cache into packed tensors, in place and functionally.

Formula (op-plugin's test of ``npu_gather_pa_kv_cache``): the tokens of each sequence through its row of ``block_tables``, from the
first token of the block that holds its ``seq_offset`` on, one sequence behind the other until ``key`` is full. A token whose
block the
table does not name, or the cache does not have, is 0. With ``is_seq_lens_cumsum`` the lengths are running totals that begin with 0.
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._paged_cache import is_split, read_slots
from npugraph_ex.operators._precision import HALVES
from npugraph_ex.operators._record import Call, Operator, call


def _slots(
    tables: torch.Tensor, lengths: torch.Tensor, offsets: torch.Tensor | None, size: int, tokens: int
) -> torch.Tensor:
    """The slot of each token, -1 where there is none: [tokens]."""
    rows = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    ends = lengths.cumsum(0)
    positions = torch.arange(len(rows)) - (ends - lengths)[rows]
    blocks = positions // size + (0 if offsets is None else (offsets.long() // size)[rows])
    known = blocks < tables.shape[1]
    block = torch.where(known, tables.long()[rows, blocks.clamp(0, tables.shape[1] - 1)], -1)
    slots = torch.where(block >= 0, block * size + positions % size, -1)[:tokens]
    return torch.nn.functional.pad(slots, (0, tokens - len(slots)), value=-2)


def _example() -> Call:
    caches, outs = (torch.randn(6, 4, 1, 16).half() for _ in range(2)), (torch.zeros(7, 1, 16).half() for _ in range(2))
    tables, lengths = torch.tensor([[3, 0], [1, 5]], dtype=torch.int32), torch.tensor([5, 2], dtype=torch.int32)
    return call(*caches, tables, lengths, *outs, seq_offset=torch.tensor([0, 4], dtype=torch.int32))


@Operator(
    name="npu::npu_gather_pa_kv_cache",
    source="op-plugin's test of npu_gather_pa_kv_cache; CANN operator documentation, aclnnGatherPaKvCache",
    dtypes=(*HALVES, torch.float32, torch.int8),
    examples=(_example,),
)
def npu_gather_pa_kv_cache(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    seq_offset: torch.Tensor | None = None,
    is_seq_lens_cumsum: bool = False,
) -> None:
    """Fills ``key`` [T, N, Dk] and ``value`` [T, N, Dv]; caches [blocks, size, N, D] or in layout NZ, [blocks, parts, size, E]."""
    lengths = (seq_lens.diff() if is_seq_lens_cumsum else seq_lens).long()
    for cache, out in ((key_cache, key), (value_cache, value)):
        split = is_split(cache, out.shape[1], out.shape[2])
        size = cache.shape[2 if split else 1]
        slots = _slots(block_tables, lengths, seq_offset, size, out.shape[0])
        kept = (slots >= 0) & (slots < cache.shape[0] * size)
        out[kept] = read_slots(cache, slots[kept], split=split).reshape(-1, *out.shape[1:])
        out[~kept & (slots > -2)] = 0


@Operator(
    name="npu::npu_gather_pa_kv_cache_functional",
    source="op-plugin's test of npu_gather_pa_kv_cache; CANN operator documentation, aclnnGatherPaKvCache",
    dtypes=(*HALVES, torch.float32, torch.int8),
    examples=(_example,),
)
def npu_gather_pa_kv_cache_functional(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    seq_offset: torch.Tensor | None = None,
    is_seq_lens_cumsum: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Filled copies of ``key`` and ``value``."""
    copies = key.clone(memory_format=torch.contiguous_format), value.clone(memory_format=torch.contiguous_format)
    how = {"seq_offset": seq_offset, "is_seq_lens_cumsum": is_seq_lens_cumsum}
    npu_gather_pa_kv_cache(key_cache, value_cache, block_tables, seq_lens, *copies, **how)  # type: ignore[arg-type]
    return copies
