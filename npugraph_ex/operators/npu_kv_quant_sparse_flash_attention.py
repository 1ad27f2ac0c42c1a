"""Sparse attention to latent keys that are quantised by tiles, with their rotary part and their scales in the same row.

A row of ``key`` has, in bytes: the latent part, one byte an element (int8, float8_e4m3fn or hifloat8); the rotary part in the dtype
of ``query``; and a float32 scale for each ``tile_size`` elements of the latent part. Formula (operator documentation of
``torch_npu.npu_kv_quant_sparse_flash_attention``; op-plugin's test)::

    K = V  = latent * scale, rounded to the dtype of query
    output = that of ``npu_sparse_flash_attention`` of the two parts of query, K, V and the rotary part

The values are those of the keys, so ``value`` is not read.
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._hifloat8 import decode
from npugraph_ex.operators._precision import HALVES, refused, unsupported
from npugraph_ex.operators._record import Call, Operator, call
from npugraph_ex.operators.npu_sparse_flash_attention import npu_sparse_flash_attention

_NAME = "npu_kv_quant_sparse_flash_attention"
_FOREVER = (1 << 63) - 1
_HIFLOAT8 = 290
_TILE, _ROPE = 128, 64


def _latent(stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The numbers of the latent part, from its bytes; those of a key of uint8 are hifloat8."""
    return decode(stored) if dtype == torch.uint8 else stored.view(dtype).float()


def _keys(*size: int) -> torch.Tensor:
    """[..., 1, 260] bytes: numbers of int8, a rotary part of float16, and a scale."""
    latent = torch.randint(-99, 99, (*size, 1, 128), dtype=torch.int8)
    rope, scale = torch.randn(*size, 1, 64).half(), torch.rand(*size, 1, 1) / 50
    return torch.cat([latent, rope.view(torch.int8), scale.view(torch.int8)], -1)


def _paged_example() -> Call:
    """Two packed sequences of 1 and 2 queries, and keys in pages."""
    lengths = {"query": [1, 3], "kv": [5, 6]}
    sizes = {f"actual_seq_lengths_{name}": torch.tensor(ends).int() for name, ends in lengths.items()}
    where = {"layout_query": "TND", "layout_kv": "PA_BSND", "block_table": torch.tensor([[3, 0], [1, 2]]).int()}
    key, indices = _keys(4, 4), torch.tensor([0, 1, 3, 4, -1, -1]).int().expand(3, 1, 6).contiguous()
    return call(torch.randn(3, 4, 192).half(), key, key, indices, 0.1, 2, 2, attention_mode=2, **where, **sizes)


def _example() -> Call:
    query, key = torch.randn(2, 3, 4, 192).half(), _keys(2, 5)
    indices = torch.tensor([0, 1, 3, 4, -1, -1], dtype=torch.int32).expand(2, 3, 1, 6).contiguous()
    return call(query, key, key, indices, 0.1, 2, 2, attention_mode=2)


@Operator(
    name=f"npu::{_NAME}",
    source="operator documentation of torch_npu.npu_kv_quant_sparse_flash_attention; op-plugin's test",
    examples=(_example, _paged_example),
)
def npu_kv_quant_sparse_flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sparse_indices: torch.Tensor,
    scale_value: float,
    key_quant_mode: int,
    value_quant_mode: int,
    *,
    key_dequant_scale: torch.Tensor | None = None,
    value_dequant_scale: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    actual_seq_lengths_query: torch.Tensor | None = None,
    actual_seq_lengths_kv: torch.Tensor | None = None,
    sparse_block_size: int = 1,
    layout_query: str = "BSND",
    layout_kv: str = "BSND",
    sparse_mode: int = 3,
    pre_tokens: int = _FOREVER,
    next_tokens: int = _FOREVER,
    attention_mode: int = 0,
    quant_scale_repo_mode: int = 1,
    tile_size: int = _TILE,
    rope_head_dim: int = _ROPE,
    key_dtype: int | None = None,
    value_dtype: int | None = None,
) -> torch.Tensor:
    """[B, S, N, D] or [T, N, D] like query without its rotary part; all else as in ``npu_sparse_flash_attention``.

    key: [..., Nkv, D + 2 * 64 + 4 * D / 128] bytes, of int8, float8_e4m3fn, or uint8 with ``key_dtype`` hifloat8.
    """
    only = {
        "key_quant_mode": (key_quant_mode, 2), "value_quant_mode": (value_quant_mode, 2), "attention_mode": (attention_mode, 2),
        "quant_scale_repo_mode": (quant_scale_repo_mode, 1), "tile_size": (tile_size, _TILE),
        "rope_head_dim": (rope_head_dim, _ROPE), "pre_tokens": (pre_tokens, _FOREVER), "next_tokens": (next_tokens, _FOREVER),
        "key_dequant_scale": (key_dequant_scale, None), "value_dequant_scale": (value_dequant_scale, None),
    }  # fmt: skip
    if key_dtype not in {None, _HIFLOAT8} or value_dtype != key_dtype:
        both = (key_dtype, value_dtype)
        raise refused(_NAME, "key_dtype and value_dtype", both, f"None or {_HIFLOAT8} (hifloat8), for both")
    for name, (given, wanted) in only.items():
        if given is not wanted and (isinstance(given, torch.Tensor) or given != wanted):
            raise refused(_NAME, name, "a tensor" if isinstance(given, torch.Tensor) else given, str(wanted))
    keys = {torch.uint8} if key_dtype == _HIFLOAT8 else {torch.int8, torch.float8_e4m3fn}
    if query.dtype not in HALVES or key.dtype not in keys:
        raise unsupported(
            _NAME, "query and key", (query.dtype, key.dtype, key_dtype),
            "float16 and bfloat16 queries; int8 and float8_e4m3fn keys, and uint8 with key_dtype hifloat8",
        )  # fmt: skip
    size = query.shape[-1] - _ROPE
    width = size + 2 * _ROPE + 4 * (size // _TILE)
    if size <= 0 or size % _TILE or key.shape[-1] != width:
        raise refused(_NAME, "key", key.shape, f"of {width} bytes a row, for queries of {size} + {_ROPE} numbers")
    parts = [part.contiguous() for part in key.view(torch.uint8).split([size, 2 * _ROPE, width - size - 2 * _ROPE], -1)]
    scale = parts[2].view(torch.float32).repeat_interleave(_TILE, -1)
    latent = (_latent(parts[0], key.dtype) * scale).to(query.dtype)
    return npu_sparse_flash_attention(
        query[..., :size], latent, latent, sparse_indices, scale_value, block_table=block_table,
        actual_seq_lengths_query=actual_seq_lengths_query, actual_seq_lengths_kv=actual_seq_lengths_kv,
        query_rope=query[..., size:], key_rope=parts[1].view(query.dtype), sparse_block_size=sparse_block_size,
        layout_query=layout_query, layout_kv=layout_kv, sparse_mode=sparse_mode, attention_mode=attention_mode,
    )[0]  # fmt: skip
