"""Rotary position embedding from a table of cosines and sines, as serving engines call it.

``vllm::npu_rotary_embedding`` is a custom operator of vLLM-Ascend, not of torch_npu. Formula (vLLM's documentation of
``RotaryEmbedding``; vllm_ascend/ops/rotary_embedding.py)::

    cos, sin = halves of cos_sin_cache[positions], each repeated for both members of a pair
    output   = x * cos + rotated(x) * sin           in the first rotary_dim elements of each head, the rest unchanged

``rotated`` turns pairs ``(a, b)`` into ``(-b, a)``: with ``is_neox_style`` a pair is one element of the first half of
the rotated part and its counterpart in the second, otherwise two neighbours. ``atb::_npu_rotary_embedding`` computes the same in
place.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from npugraph_ex.operators._precision import HALVES, compute_dtype
from npugraph_ex.operators._record import Call, Operator, call
from npugraph_ex.operators.npu_rotary_mul import rotated


def embed(
    x: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor, *, is_neox_style: bool = True
) -> torch.Tensor:
    """``x`` of shape (tokens, heads, head size) embedded, in float32, or float64 where any input is; not rounded."""
    dtype = compute_dtype(x, cos_sin_cache)
    wide = x.to(dtype)
    cos, sin = cos_sin_cache.index_select(0, positions.flatten()).to(dtype).unsqueeze(1).chunk(2, dim=-1)
    if is_neox_style:
        cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)
    else:
        cos, sin = cos.repeat_interleave(2, dim=-1), sin.repeat_interleave(2, dim=-1)
    size = cos.shape[-1]
    turned = rotated(wide[..., :size], "half" if is_neox_style else "interleave")
    return torch.cat((wide[..., :size] * cos + turned * sin, wide[..., size:]), dim=-1)


def _example() -> Call:
    angles = torch.rand(8, 8)
    table = torch.cat((angles.cos(), angles.sin()), -1)
    return call(torch.tensor([3, 0, 5]), torch.randn(3, 64), torch.randn(3, 32), table, 16, 16, True)


def _fake(*arguments: Any) -> tuple[torch.Tensor, ...]:
    return tuple(torch.empty_like(value, memory_format=torch.contiguous_format) for value in arguments[1:3])


@Operator(
    name="vllm::npu_rotary_embedding",
    source="vllm_ascend/ops/rotary_embedding.py",
    schema=(
        "(Tensor positions, Tensor query, Tensor key, Tensor cos_sin_cache, SymInt head_size, SymInt rotary_dim, "
        "bool is_neox_style) -> (Tensor, Tensor)"
    ),
    fake=_fake,
    dtypes=(torch.float16, torch.bfloat16, torch.float32),
    examples=(_example,),
)
def npu_rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    head_size: int,
    rotary_dim: int,
    is_neox_style: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(query, key)`` embedded: shapes (tokens, heads * head_size) or (tokens, heads, head_size), dtypes kept.

    ``positions``: (tokens,), rows of ``cos_sin_cache``, which has shape (rows, rotary_dim).
    """
    if cos_sin_cache.shape[-1] != rotary_dim:
        raise ValueError(
            f"npu_rotary_embedding: cos_sin_cache must have rotary_dim = {rotary_dim} columns; "
            f"it has shape {tuple(cos_sin_cache.shape)}."
        )
    tokens = positions.numel()
    query_out, key_out = (
        embed(
            x.reshape(tokens, math.prod(x.shape[positions.dim() :]) // head_size, head_size),
            positions,
            cos_sin_cache,
            is_neox_style=is_neox_style,
        )
        for x in (query, key)
    )
    return query_out.to(query.dtype).view(query.shape), key_out.to(key.dtype).view(key.shape)


def _in_place_example() -> Call:
    positions, query, key, table, head_size, *_ = _example().args
    return call(positions, query.half(), key.half(), head_size, table.half(), False)


@Operator(
    name="atb::_npu_rotary_embedding",
    source="op-plugin, ops/atb/RopeAtb.cpp; ATB library, Rope",
    dtypes=HALVES,
    examples=(_in_place_example,),
)
def npu_rotary_embedding_(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox_style: bool,
) -> None:
    """``query`` and ``key``, changed; arguments as in ``vllm::npu_rotary_embedding``.

    The library keeps the first table of a process.
    """
    embedded = npu_rotary_embedding(
        positions, query, key, cos_sin_cache, head_size, cos_sin_cache.shape[-1], is_neox_style
    )
    for target, result in zip((query, key), embedded, strict=True):
        target.copy_(result)
