"""Attention of each query to the keys that an index names (sparse attention of latent keys).

Formula (operator documentation of ``torch_npu.npu_sparse_flash_attention``; op-plugin's test)::

    K'     = the blocks of ``sparse_block_size`` keys that sparse_indices names for the query, as far as -1
    output = softmax(scale * (Q K'^T + Q_rope K'_rope^T)) V'

In sparse mode 3 a key behind the query, whose last row stands at the last key, is left out. A sink is one more score of a head.
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._alike import Alike
from npugraph_ex.operators._attention import Attended, attended
from npugraph_ex.operators._precision import HALVES, compute_dtype, unsupported
from npugraph_ex.operators._record import Call, Operator, call
from npugraph_ex.operators._sparse_sequences import Layouts, rows_of

_FOREVER = (1 << 63) - 1


def _named_keys(indices: torch.Tensor, block: int, length: int, limit: int) -> torch.Tensor:
    """The keys before ``limit`` that a row of indices names."""
    ended = (indices < 0).nonzero()
    named = indices[: int(ended[0])] if len(ended) else indices
    keys = (named.long().unsqueeze(-1) * block + torch.arange(block)).reshape(-1)
    return keys[keys < min(length, limit)]


def _example() -> Call:
    query, key, rope = torch.randn(2, 3, 4, 16).half(), torch.randn(2, 5, 1, 16).half(), torch.randn(2, 3, 4, 8).half()
    indices = torch.tensor([0, 1, 3, 4, -1, -1], dtype=torch.int32).expand(2, 3, 1, 6).contiguous()
    how = {"query_rope": rope, "key_rope": torch.randn(2, 5, 1, 8).half(), "attention_mode": 2}
    return call(query, key, key, indices, 0.2, **how)


@Operator(
    name="npu::npu_sparse_flash_attention",
    source="operator documentation of torch_npu.npu_sparse_flash_attention; op-plugin's test",
    covers={"attention_mode": (0, 2)},
    dtypes=HALVES,
    alike=Alike(dtype=("query", "key", "value")),
    examples=(_example,),
)
def npu_sparse_flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor | None,
    sparse_indices: torch.Tensor,
    scale_value: float,
    *,
    block_table: torch.Tensor | None = None,
    actual_seq_lengths_query: torch.Tensor | None = None,
    actual_seq_lengths_kv: torch.Tensor | None = None,
    query_rope: torch.Tensor | None = None,
    key_rope: torch.Tensor | None = None,
    sparse_block_size: int = 1,
    layout_query: str = "BSND",
    layout_kv: str = "BSND",
    sparse_mode: int = 3,
    pre_tokens: int = _FOREVER,
    next_tokens: int = _FOREVER,
    attention_mode: int = 0,
    return_softmax_lse: bool = False,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(output, row maxima, row sums)``: like ``query``; [B, Nkv, S, N/Nkv] or [Nkv, T, N/Nkv] in float32, or empty.

    query [B, S, N, D] or [T, N, D]; keys likewise with Nkv heads or in pages [blocks, size, Nkv, D]; indices with Nkv heads and
    a count.
    """
    if sparse_mode not in {0, 3}:
        raise unsupported("npu_sparse_flash_attention", "sparse_mode", sparse_mode, "0 and 3")
    how = Layouts(
        "npu_sparse_flash_attention",
        layout_query,
        layout_kv,
        actual_seq_lengths_query,
        actual_seq_lengths_kv,
        block_table,
        "layout_kv",
    )
    how.check()
    dtype = compute_dtype(query, key)
    given = [key, key if value is None else value, *([] if key_rope is None else [key_rope])]
    heads, shared = query.shape[-2], key.shape[-2]
    queries = (query if query_rope is None else torch.cat((query, query_rope), -1)).flatten(0, -3).to(dtype)
    indices = sparse_indices.reshape(-1, *sparse_indices.shape[-2:])
    output = queries.new_zeros(len(queries), heads, query.shape[-1])
    largest, total = (queries.new_zeros(len(queries), shared, heads // shared) for _ in range(2))
    for rows, (plain, values, *rope) in rows_of(how, query, *given):
        keys = torch.cat((plain, *rope), -1).to(dtype)
        length = len(keys)
        for row in range(rows.start, rows.stop):
            limit = length - (rows.stop - 1 - row) if sparse_mode == 3 else length
            for n in range(shared):
                named = _named_keys(indices[row, n], sparse_block_size, length, limit)
                mine = slice(n * heads // shared, (n + 1) * heads // shared)
                result = _row(queries[row, mine], keys[named, n], values[named, n].to(dtype), scale_value, sinks, mine)
                output[row, mine] = result.output[:, 0]
                largest[row, n], total[row, n] = result.maximum[:, 0, 0], result.total[:, 0, 0]
    if not return_softmax_lse:
        return output.reshape(query.shape).to(query.dtype), largest.new_empty(0), largest.new_empty(0)
    statistics = [each.unflatten(0, query.shape[:-2]).movedim(-2, -3).contiguous() for each in (largest, total)]
    return output.reshape(query.shape).to(query.dtype), statistics[0], statistics[1]


def _row(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, sinks: torch.Tensor | None, mine: slice
) -> Attended:
    """Attention of the heads [N, D] of one row to its keys [S, D]."""
    return attended(q.unsqueeze(1), k.unsqueeze(0), v.unsqueeze(0), scale, sink=None if sinks is None else sinks[mine])
