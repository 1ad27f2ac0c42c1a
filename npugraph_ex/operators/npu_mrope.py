"""Rotary position embedding with three positions a token: time, height and width (multimodal models).

Formula (operator documentation of ``torch_npu.npu_mrope``): as in ``npu_rotary_embedding``, where the cosine and sine of a pair
of elements are those of one of the three positions. With ``cache_mode`` default the first ``mrope_section[0]`` pairs take the first
position, the next ``mrope_section[1]`` the second, the rest the third; with ``interleave`` the pairs take the three in turns, as
far as ``3 * mrope_section[1]``, and then the first.
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._alike import Alike
from npugraph_ex.operators._precision import compute_dtype, stored_like, unsupported
from npugraph_ex.operators._record import Call, Operator, call
from npugraph_ex.operators.npu_rotary_embedding import embed

_NEOX = {"half": True, "interleave": False}


def _axis_of_pairs(sections: list[int], pairs: int, cache_mode: str | None) -> torch.Tensor:
    """For each pair, which of the three positions it takes: [pairs]."""
    axis = torch.zeros(pairs, dtype=torch.int64)
    if cache_mode == "interleave":
        axis[1 : sections[1] * 3 : 3], axis[2 : sections[1] * 3 : 3] = 1, 2
    elif cache_mode in {"default", None}:
        axis[sections[0] :], axis[sections[0] + sections[1] :] = 1, 2
    else:
        raise unsupported("npu_mrope", "cache_mode", cache_mode, "'default' and 'interleave'")
    return axis


def _example(positions: torch.Tensor, **kwargs: object) -> Call:
    return call(
        positions, torch.randn(3, 64).half(), torch.randn(3, 32).half(), torch.randn(8, 16).half(), 16, **kwargs
    )


@Operator(
    name="npu::npu_mrope",
    source="operator documentation of torch_npu.npu_mrope; op-plugin's test",
    dtypes=(torch.float16, torch.bfloat16, torch.float32),
    alike=Alike(dtype=("query", "key", "cos_sin_cache")),
    examples=(
        lambda: _example(torch.tensor([[3, 0, 5], [1, 1, 2], [7, 6, 0]]), mrope_section=[2, 3, 3]),
        lambda: _example(torch.tensor([3, 0, 5]), mrope_section=[0, 0, 0]),
    ),
)
def npu_mrope(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    head_size: int,
    *,
    mrope_section: list[int] | None = None,
    rotary_mode: str | None = "half",
    cache_mode: str | None = "default",
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(query, key)`` embedded, [T, N * D]; positions [T] or [3, T], ``cos_sin_cache`` [positions, rotated elements]."""
    if rotary_mode not in _NEOX:
        raise unsupported("npu_mrope", "rotary_mode", rotary_mode, "'half' and 'interleave'")
    table, tokens = cos_sin_cache, torch.arange(positions.shape[-1])
    if positions.dim() == 2:
        pairs = cos_sin_cache.shape[-1] // 2
        axis = _axis_of_pairs([*(mrope_section or (0, 0, 0))], pairs, cache_mode)
        rows = cos_sin_cache.unflatten(-1, (2, pairs))[positions]  # [3, T, 2, pairs]
        table = rows.permute(3, 0, 1, 2)[torch.arange(pairs), axis].permute(1, 2, 0).flatten(1)
    else:
        tokens = positions
    embedded = []
    for x in (query, key):
        heads = x.reshape(positions.shape[-1], -1, head_size).to(compute_dtype(x, table))
        result = embed(heads, tokens, table, is_neox_style=_NEOX[rotary_mode])
        embedded.append(stored_like(x, result.reshape(x.shape), x.dtype))
    return embedded[0], embedded[1]
