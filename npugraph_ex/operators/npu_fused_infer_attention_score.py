"""Attention of inference over a key-value cache, two versions. The formula and its limits are in ``_infer_attention``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from npugraph_ex.operators._alike import Alike
from npugraph_ex.operators._infer_attention import Band, Extras, Lengths, Prefix, attend, checked_heads
from npugraph_ex.operators._precision import HALVES, unsupported
from npugraph_ex.operators._quantised_cache import Dequantiser, Int8Products, OutputQuantiser, of_both
from npugraph_ex.operators._record import Call, Operator, call
from npugraph_ex.operators._scalar_types import dtype_of

_NO_LIMIT = 2147483647
_STORED = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)


def _example(heads: str, lengths: str) -> Call:
    """One query row each for two sequences, whose caches have different lengths."""
    query, key, value = (torch.randn(2, rows, 16).half() for rows in (1, 6, 6))
    return call(query, key, value, input_layout="BSH", **{heads: 2, lengths: [5, 3]})


def _masked_example() -> Call:
    """A bias and a causal mask."""
    rest = {"pse_shift": torch.randn(2, 2, 2, 2).half(), "atten_mask": torch.ones(2, 2).triu(1).bool()}
    return call(*(torch.randn(2, 2, 2, 16).half() for _ in range(3)), num_query_heads=2, input_layout="BNSD", **rest)


def _sink_example() -> Call:
    operands = (torch.randn(2, 2, 2, 16).bfloat16() for _ in range(3))
    return call(*operands, num_query_heads=2, input_layout="BNSD", learnable_sink=torch.randn(2).bfloat16())


def _rotary_example() -> Call:
    """Two query heads that share one key head, with rotary parts, and a tree of two drafted tokens."""
    query, key, value, query_rope, key_rope = (
        torch.randn(2, *size).half() for size in ((2, 2, 32), (1, 6, 32), (1, 6, 32), (2, 2, 16), (1, 6, 16))
    )
    heads = {"num_query_heads": 2, "num_key_value_heads": 1, "input_layout": "BNSD"}
    tree = {"atten_mask": torch.tensor([[[False, True], [True, False]]] * 2), "sparse_mode": 9}
    return call(query, key, value, query_rope=query_rope, key_rope=key_rope, **heads, **tree)


def _int8_example() -> Call:
    """Query and keys of int8, as multi-head latent attention has them."""
    codes = (torch.randint(-9, 9, size, dtype=torch.int8) for size in ((2, 2, 16), (2, 6, 16), (2, 6, 16)))
    scales = {name: torch.rand(1) / 9 for name in ("dequant_scale_key", "dequant_scale_value")}
    ropes = {name: torch.randn(2, rows, 8).half() for name, rows in (("query_rope", 2), ("key_rope", 6))}
    return call(*codes, dequant_scale_query=torch.rand(2, 2, 1), query_quant_mode=3, **scales, **ropes)


def _paged_example() -> Call:
    """A paged cache of int8, and a result of int8."""
    caches = (torch.randint(-9, 9, (4, 4, 16), dtype=torch.int8) for _ in range(2))
    scales = {
        f"dequant_{part}": torch.rand(16).half() for part in ("scale_key", "scale_value", "offset_key", "offset_value")
    }
    scales |= {"quant_scale_out": torch.rand(1), "quant_offset_out": torch.rand(1)}
    pages = {"block_table": torch.tensor([[3, 0], [1, 2]]).int(), "block_size": 4, "actual_seq_kvlen": [5, 3]}
    heads = {"num_query_heads": 2, "num_key_value_heads": 1, "input_layout": "BNSD"}
    return call(torch.randn(2, 2, 1, 16).half(), *caches, **heads, **scales, **pages)


@Operator(
    name="npu::npu_fused_infer_attention_score",
    source="operator documentation of torch_npu.npu_fused_infer_attention_score",
    covers={
        "inner_precise": range(4),
        "antiquant_mode": (0, 1),
        "key_antiquant_mode": range(6),
        "value_antiquant_mode": range(6),
    },
    dtypes=HALVES,
    host_arguments=("actual_seq_lengths", "actual_seq_lengths_kv", "actual_shared_prefix_len"),
    workspace="npu::_npu_fused_infer_attention_score_get_max_workspace",
    alike=Alike(
        dtype=("query", "key", "value", "pse_shift"),
        besides={"key": (torch.int8, torch.int32), "value": (torch.int8, torch.int32), "pse_shift": (torch.float16,)},
    ),
    examples=(lambda: _example("num_heads", "actual_seq_lengths_kv"),),
)
def npu_fused_infer_attention_score(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    pse_shift: torch.Tensor | None = None,
    atten_mask: torch.Tensor | None = None,
    actual_seq_lengths: Sequence[int] | None = None,
    actual_seq_lengths_kv: Sequence[int] | None = None,
    dequant_scale1: torch.Tensor | None = None,
    quant_scale1: torch.Tensor | None = None,
    dequant_scale2: torch.Tensor | None = None,
    quant_scale2: torch.Tensor | None = None,
    quant_offset2: torch.Tensor | None = None,
    antiquant_scale: torch.Tensor | None = None,
    antiquant_offset: torch.Tensor | None = None,
    key_antiquant_scale: torch.Tensor | None = None,
    key_antiquant_offset: torch.Tensor | None = None,
    value_antiquant_scale: torch.Tensor | None = None,
    value_antiquant_offset: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    query_padding_size: torch.Tensor | None = None,
    kv_padding_size: torch.Tensor | None = None,
    key_shared_prefix: torch.Tensor | None = None,
    value_shared_prefix: torch.Tensor | None = None,
    actual_shared_prefix_len: Sequence[int] | None = None,
    query_rope: torch.Tensor | None = None,
    key_rope: torch.Tensor | None = None,
    key_rope_antiquant_scale: torch.Tensor | None = None,
    num_heads: int = 1,
    scale: float = 1.0,
    pre_tokens: int = _NO_LIMIT,
    next_tokens: int = _NO_LIMIT,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    inner_precise: int = 0,
    block_size: int = 0,
    antiquant_mode: int = 0,
    key_antiquant_mode: int = 0,
    value_antiquant_mode: int = 0,
    softmax_lse_flag: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(output, lse)``: output like ``query`` in layout; lse [B, N, S, 1] float32, empty unless ``softmax_lse_flag``.

    query [B, S, N*D], [B, S, N, D] or [B, N, S, D]; key and value likewise with ``num_key_value_heads`` heads. In layout TND
    query [T, N, D] and lse [T, N, 1], with ``actual_seq_lengths`` as running totals. The rotary parts are laid out alike.
    """
    heads = checked_heads(
        "npu_fused_infer_attention_score",
        input_layout,
        num_heads,
        num_key_value_heads,
        key_rope_antiquant_scale=key_rope_antiquant_scale,
    )
    band = Band(atten_mask, sparse_mode, pre_tokens, next_tokens)
    lengths = Lengths(actual_seq_lengths, actual_seq_lengths_kv)
    dequantisers = of_both(antiquant_scale, antiquant_offset, antiquant_mode)
    if key_antiquant_scale is not None:
        dequantisers = (
            Dequantiser(key_antiquant_scale, key_antiquant_offset, key_antiquant_mode),
            Dequantiser(value_antiquant_scale, value_antiquant_offset, value_antiquant_mode),
        )
    extras = Extras(
        dequantisers,
        OutputQuantiser(quant_scale2, quant_offset2),
        ropes=(query_rope, key_rope),
        prefix=Prefix(key_shared_prefix, value_shared_prefix, _only(actual_shared_prefix_len)),
        padding=(query_padding_size, kv_padding_size),
        products=Int8Products(dequant_scale1, quant_scale1, dequant_scale2),
    )
    extras.products.check(heads.operator, ("dequant_scale1", "quant_scale1", "dequant_scale2"))
    output, lse = attend((query, key, value), heads, scale, band, lengths, pse_shift, block_table, extras)
    return output, _given(lse, wanted=softmax_lse_flag)


@Operator(
    name="npu::npu_fused_infer_attention_score_v2",
    source="operator documentation of torch_npu.npu_fused_infer_attention_score_v2",
    covers={
        "inner_precise": range(4),
        "query_quant_mode": (0, 3),
        "key_quant_mode": range(6),
        "value_quant_mode": range(6),
    },
    dtypes=HALVES,
    host_arguments=("actual_seq_qlen", "actual_seq_kvlen"),
    workspace="npu::_npu_fused_infer_attention_score_v2_get_max_workspace",
    alike=Alike(
        dtype=("query", "key", "value", "pse_shift"),
        besides={"key": (torch.int8, torch.int32), "value": (torch.int8, torch.int32), "pse_shift": (torch.float16,)},
    ),
    examples=(
        lambda: _example("num_query_heads", "actual_seq_kvlen"),
        _masked_example,
        _sink_example,
        _rotary_example,
        _int8_example,
        _paged_example,
    ),
)
def npu_fused_infer_attention_score_v2(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    query_rope: torch.Tensor | None = None,
    key_rope: torch.Tensor | None = None,
    pse_shift: torch.Tensor | None = None,
    atten_mask: torch.Tensor | None = None,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    block_table: torch.Tensor | None = None,
    dequant_scale_query: torch.Tensor | None = None,
    dequant_scale_key: torch.Tensor | None = None,
    dequant_offset_key: torch.Tensor | None = None,
    dequant_scale_value: torch.Tensor | None = None,
    dequant_offset_value: torch.Tensor | None = None,
    dequant_scale_key_rope: torch.Tensor | None = None,
    quant_scale_out: torch.Tensor | None = None,
    quant_offset_out: torch.Tensor | None = None,
    quant_scale_p: torch.Tensor | None = None,
    learnable_sink: torch.Tensor | None = None,
    num_query_heads: int = 1,
    num_key_value_heads: int = 0,
    softmax_scale: float = 1.0,
    pre_tokens: int = _NO_LIMIT,
    next_tokens: int = _NO_LIMIT,
    input_layout: str = "BSH",
    sparse_mode: int = 0,
    block_size: int = 0,
    query_quant_mode: int = 0,
    key_quant_mode: int = 0,
    value_quant_mode: int = 0,
    inner_precise: int = 0,
    return_softmax_lse: bool = False,
    query_dtype: int | None = None,
    key_dtype: int | None = None,
    value_dtype: int | None = None,
    query_rope_dtype: int | None = None,
    key_rope_dtype: int | None = None,
    key_shared_prefix_dtype: int | None = None,
    value_shared_prefix_dtype: int | None = None,
    dequant_scale_query_dtype: int | None = None,
    dequant_scale_key_dtype: int | None = None,
    dequant_scale_value_dtype: int | None = None,
    dequant_scale_key_rope_dtype: int | None = None,
    out_dtype: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``npu_fused_infer_attention_score``, under v2's names."""
    heads = checked_heads(
        "npu_fused_infer_attention_score_v2",
        input_layout,
        num_query_heads,
        num_key_value_heads,
        dequant_scale_key_rope=dequant_scale_key_rope,
        quant_scale_p=quant_scale_p,
        query_dtype=query_dtype,
        key_dtype=key_dtype,
        value_dtype=value_dtype,
        query_rope_dtype=query_rope_dtype,
        key_rope_dtype=key_rope_dtype,
        key_shared_prefix_dtype=key_shared_prefix_dtype,
        value_shared_prefix_dtype=value_shared_prefix_dtype,
        dequant_scale_query_dtype=dequant_scale_query_dtype,
        dequant_scale_key_dtype=dequant_scale_key_dtype,
        dequant_scale_value_dtype=dequant_scale_value_dtype,
        dequant_scale_key_rope_dtype=dequant_scale_key_rope_dtype,
    )
    stored, floating = _outputs(out_dtype, quantised=quant_scale_out is not None, codes=query.dtype == torch.int8)
    band = Band(atten_mask, sparse_mode, pre_tokens, next_tokens)
    lengths = Lengths(actual_seq_qlen, actual_seq_kvlen)
    dequantisers = (
        Dequantiser(dequant_scale_key, dequant_offset_key, key_quant_mode),
        Dequantiser(dequant_scale_value, dequant_offset_value, value_quant_mode),
    )
    extras = Extras(
        dequantisers,
        OutputQuantiser(quant_scale_out, quant_offset_out, stored),
        learnable_sink,
        ropes=(query_rope, key_rope),
        query_scale=dequant_scale_query,
        floating=floating,
    )
    output, lse = attend((query, key, value), heads, softmax_scale, band, lengths, pse_shift, block_table, extras)
    return output, _given(lse, wanted=return_softmax_lse)


def _outputs(code: int | None, *, quantised: bool, codes: bool) -> tuple[torch.dtype, torch.dtype | None]:
    """``(dtype of a quantised result, dtype of another one)`` that ``out_dtype`` names; None: that of the operands."""
    if code is None:
        return torch.int8, None
    name = "npu_fused_infer_attention_score_v2"
    dtype = dtype_of(code, name, "out_dtype")
    if dtype not in (_STORED if quantised else HALVES if codes else ()):
        known = "int8, float8_e4m3fn and float8_e5m2 with quant_scale_out; float16 and bfloat16 of an int8 query"
        raise unsupported(name, "out_dtype", dtype, known)
    return (dtype, None) if quantised else (torch.int8, dtype)


def _only(lengths: Sequence[int] | None) -> int | None:
    """The one length of a prefix; None where the operator takes all of it."""
    return int(lengths[0]) if lengths else None


def _given(lse: torch.Tensor, *, wanted: bool) -> torch.Tensor:
    """The statistics that the operator hands out: none unless asked for, then in the dtype of the computation."""
    return lse if wanted else lse.new_empty(0)
