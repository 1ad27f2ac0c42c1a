"""Keys and values of whole sequences, read from a paged cache to packed tokens.

Formula (op-plugin's test of ``npu_paged_cache_load``): for each sequence, ``context_lens`` tokens from the first token of the block
that holds its ``seq_starts`` on, through its row of ``block_table``; the sequences stand one behind the other. With ``cumsum``
the lengths are running totals that begin with 0.
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._paged_cache import read_sequence
from npugraph_ex.operators._precision import HALVES
from npugraph_ex.operators._record import Call, Operator, call


def _example() -> Call:
    caches = (torch.randn(6, 4, 1, width).half() for width in (16, 8))
    tables = torch.tensor([[3, 0], [1, 5]], dtype=torch.int32)
    return call(
        *caches, tables, torch.tensor([5, 2], dtype=torch.int32), seq_starts=torch.tensor([0, 5], dtype=torch.int32)
    )


@Operator(
    name="atb::npu_paged_cache_load",
    source="op-plugin, ops/atb/PagedCacheLoadAtb.cpp and its test",
    dtypes=(*HALVES, torch.int8),
    examples=(_example,),
)
def npu_paged_cache_load(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    seq_starts: torch.Tensor | None = None,
    cumsum: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(key, value)``, each [tokens, N, D]; caches [blocks, size, N, D] of any dtype, lengths and starts of int32."""
    lengths = (context_lens.diff() if cumsum else context_lens).tolist()
    size = key_cache.shape[1]
    starts = [0] * len(lengths) if seq_starts is None else [start // size * size for start in seq_starts.tolist()]
    key, value = (
        torch.cat(
            [
                read_sequence(cache, block_table[b], length, start=start)
                for b, (length, start) in enumerate(zip(lengths, starts, strict=True))
            ]
        )
        for cache in (key_cache, value_cache)
    )
    return key, value
