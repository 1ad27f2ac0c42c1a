"""Which keys sparse attention looks at: the best ``sparse_count`` by a cheap score; and of queries and keys of 8 bits.

Formula (operator documentation of ``torch_npu.npu_lightning_indexer``)::

    score[s1, s2] = sum over heads of weights[s1, n] * relu(Q_n[s1] K[s2]^T)       -inf behind the query in sparse mode 3
    indices       = the positions of the largest scores, in their order, -1 where there are no more

and of 8 bits (``torch_npu.npu_quant_lightning_indexer``) the product is multiplied by the scales of query and key. With
``sparse_mode`` 3 the last query stands at the last key. Of equal scores the first key wins.
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._alike import Alike
from npugraph_ex.operators._attention import excluded_by_band
from npugraph_ex.operators._hifloat8 import HIFLOAT8, decode
from npugraph_ex.operators._precision import HALVES, compute_dtype, unsupported
from npugraph_ex.operators._record import Call, Operator, call
from npugraph_ex.operators._sparse_sequences import Layouts, rows_of

_FOREVER = (1 << 63) - 1
_CODES = {torch.int8: (None, 1), torch.float8_e4m3fn: (None, 24, 292)}
"""What may name the dtypes of 8 bits that torch has."""


def _best(
    how: Layouts,
    query: torch.Tensor,
    key: torch.Tensor,
    weights: torch.Tensor,
    sparse: tuple[int, int],
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions and scores, each [rows of all sequences, 1, sparse_count]."""
    how.check()
    count, mode = sparse
    if mode not in {0, 3}:
        raise unsupported(how.operator, "sparse_mode", mode, "0 and 3")
    dtype = compute_dtype(query, weights)
    queries, factors = query.reshape(-1, *query.shape[-2:]).to(dtype), weights.reshape(-1, query.shape[-2]).to(dtype)
    if scales is not None:
        factors = factors * scales[0].reshape(factors.shape).to(dtype)
    indices = torch.full((len(queries), 1, count), -1, dtype=torch.int32)
    values = torch.full((len(queries), 1, count), -torch.inf, dtype=dtype)
    given = (key,) if scales is None else (key, scales[1])
    for rows, parts in rows_of(how, query, *given):
        keys = parts[0].reshape(len(parts[0]), -1).to(dtype)
        products = torch.relu(torch.einsum("snd,td->snt", queries[rows], keys))
        scores = (products * factors[rows].unsqueeze(-1)).sum(1)
        if scales is not None:
            scores = scores * parts[1].reshape(1, -1).to(dtype)
        if mode == 3:
            behind = excluded_by_band(scores.shape[0], scores.shape[1], torch.inf, 0, at_end=True)
            scores = scores.masked_fill(behind, -torch.inf)
        best, places = scores.sort(dim=-1, descending=True, stable=True)
        taken = min(count, scores.shape[1])
        seen = best[:, :taken] > -torch.inf
        indices[rows, 0, :taken] = torch.where(seen, places[:, :taken], -1).to(torch.int32)
        values[rows, 0, :taken] = best[:, :taken]
    return indices, values


def _example() -> Call:
    query, key, weights = torch.randn(2, 3, 4, 16).half(), torch.randn(2, 5, 1, 16).half(), torch.rand(2, 3, 4).half()
    return call(query, key, weights, sparse_count=4)


def _paged_example() -> Call:
    query, weights, pages = torch.randn(3, 4, 16).half(), torch.rand(3, 4).half(), torch.randn(4, 4, 1, 16).half()
    lengths = {name: torch.tensor(ends, dtype=torch.int32) for name, ends in (("query", [1, 3]), ("key", [5, 6]))}
    table = torch.tensor([[3, 0], [1, 2]], dtype=torch.int32)
    sizes = {f"actual_seq_lengths_{name}": value for name, value in lengths.items()}
    return call(
        query, pages, weights, block_table=table, layout_query="TND", layout_key="PA_BSND", sparse_count=8, **sizes
    )


@Operator(
    name="npu::npu_lightning_indexer",
    source="operator documentation of torch_npu.npu_lightning_indexer; op-plugin's test",
    covers={"pre_tokens": (_FOREVER,), "next_tokens": (_FOREVER,)},
    dtypes=HALVES,
    alike=Alike(dtype=("query", "key", "weights"), besides={"weights": (torch.float32,)}),
    examples=(_example, _paged_example),
)
def npu_lightning_indexer(
    query: torch.Tensor,
    key: torch.Tensor,
    weights: torch.Tensor,
    *,
    actual_seq_lengths_query: torch.Tensor | None = None,
    actual_seq_lengths_key: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    layout_query: str = "BSND",
    layout_key: str = "BSND",
    sparse_count: int = 2048,
    sparse_mode: int = 3,
    pre_tokens: int = _FOREVER,
    next_tokens: int = _FOREVER,
    return_value: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(indices, scores)`` [B, S, 1, sparse_count] or [T, 1, sparse_count], int32 and the query's dtype, or empty.

    query [B, S, N, D] or [T, N, D], weights without D; key [B, S, 1, D], [T, 1, D] or in pages [blocks, size, 1, D]. float16,
    bfloat16.
    """
    how = Layouts(
        "npu_lightning_indexer", layout_query, layout_key, actual_seq_lengths_query, actual_seq_lengths_key, block_table
    )
    indices, values = _best(how, query, key, weights, (sparse_count, sparse_mode))
    shape = (*query.shape[:-2], 1, sparse_count)
    scores = values.reshape(shape).to(query.dtype) if return_value else query.new_empty(0)
    return indices.reshape(shape), scores


def _numbers(elements: torch.Tensor, code: int | None, name: str) -> torch.Tensor:
    """Queries or keys of 8 bits: int8, float8_e4m3fn, or hifloat8 in another dtype of 8 bits."""
    known = _CODES.get(elements.dtype, ())
    if code == HIFLOAT8 and elements.element_size() == 1:
        return decode(elements.view(torch.uint8))
    if not known or code not in known:
        only = "int8, float8_e4m3fn and hifloat8 (290), each named by its dtype argument or by its own dtype"
        raise unsupported("npu_quant_lightning_indexer", f"{name} and {name}_dtype", (elements.dtype, code), only)
    return elements.float()


def _quantised_example() -> Call:
    query, key = (torch.randint(-9, 9, shape, dtype=torch.int8) for shape in ((2, 3, 4, 16), (2, 5, 1, 16)))
    weights, scales = torch.rand(2, 3, 4).half(), (torch.rand(2, 3, 4).half(), torch.rand(2, 5, 1).half())
    return call(query, key, weights, *scales, 0, 0, sparse_count=4)


def _quantised_packed_example(layout: str, *size: int, ends: list[int], **kwargs: torch.Tensor) -> Call:
    """Two packed sequences of 1 and 2 queries; keys [..., 1, D] packed or in pages."""
    query, key = (torch.randint(-9, 9, shape, dtype=torch.int8) for shape in ((3, 4, 16), (*size, 1, 16)))
    scales = (torch.rand(3, 4).half(), torch.rand(*size, 1).half())
    lengths = {
        "actual_seq_lengths_query": torch.tensor([1, 3]).int(),
        "actual_seq_lengths_key": torch.tensor(ends).int(),
    }
    layouts = {"layout_query": "TND", "layout_key": layout}
    return call(query, key, torch.rand(3, 4).half(), *scales, 0, 0, sparse_count=8, **lengths, **layouts, **kwargs)


@Operator(
    name="npu::npu_quant_lightning_indexer",
    source="operator documentation of torch_npu.npu_quant_lightning_indexer",
    covers={"pre_tokens": (_FOREVER,), "next_tokens": (_FOREVER,)},
    dtypes=HALVES,
    examples=(
        _quantised_example,
        lambda: _quantised_packed_example("TND", 11, ends=[5, 11]),
        lambda: _quantised_packed_example(
            "PA_BSND", 4, 4, ends=[5, 6], block_table=torch.tensor([[3, 0], [1, 2]]).int()
        ),
    ),
)
def npu_quant_lightning_indexer(
    query: torch.Tensor,
    key: torch.Tensor,
    weights: torch.Tensor,
    query_dequant_scale: torch.Tensor,
    key_dequant_scale: torch.Tensor,
    query_quant_mode: int,
    key_quant_mode: int,
    *,
    actual_seq_lengths_query: torch.Tensor | None = None,
    actual_seq_lengths_key: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    layout_query: str = "BSND",
    layout_key: str = "BSND",
    sparse_count: int = 2048,
    sparse_mode: int = 3,
    pre_tokens: int = _FOREVER,
    next_tokens: int = _FOREVER,
    query_dtype: int | None = None,
    key_dtype: int | None = None,
) -> torch.Tensor:
    """The indices of ``npu_lightning_indexer``; query and key int8, float8_e4m3fn or hifloat8, their scales without D."""
    for name, mode in (("query_quant_mode", query_quant_mode), ("key_quant_mode", key_quant_mode)):
        if mode != 0:
            raise unsupported("npu_quant_lightning_indexer", name, mode, "0, a scale for each token and head")
    lengths = (actual_seq_lengths_query, actual_seq_lengths_key)
    how = Layouts("npu_quant_lightning_indexer", layout_query, layout_key, *lengths, block_table)
    scales = (query_dequant_scale, key_dequant_scale)
    queries, keys = _numbers(query, query_dtype, "query"), _numbers(key, key_dtype, "key")
    indices, _ = _best(how, queries, keys, weights, (sparse_count, sparse_mode), scales)
    return indices.reshape(*query.shape[:-2], 1, sparse_count)
