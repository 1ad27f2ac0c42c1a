"""Queries, keys and values split, normed and embedded; keys and values written to their caches; and functionally.

Formula (op-plugin's test of ``npu_qkv_rms_norm_rope_cache``; CANN operator documentation, aclnnQkvRmsNormRopeCache)::

    q, k, v = qkv split by heads
    q       = rope(rms_norm(q, q_gamma, epsilon)),  k likewise         rope turns half by half
    q_out   = q
    cache[slot] = round(k / k_scale + k_offset), v likewise             where scales are given; a negative slot is left out

The memory of a cache is [blocks, N * D / E, size, E] (``PA_NZ``), and ``index`` [B * S] names the slots.
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._alike import Alike
from npugraph_ex.operators._paged_cache import write_slots
from npugraph_ex.operators._precision import compute_dtype, round_to_int8, unsupported
from npugraph_ex.operators._record import Call, Operator, call
from npugraph_ex.operators.npu_rms_norm import normalise
from npugraph_ex.operators.npu_rotary_mul import rotated


def _quantised(x: torch.Tensor, scale: torch.Tensor | None, offset: torch.Tensor | None) -> torch.Tensor:
    if scale is None:
        return x
    quotient = x / scale.to(x.dtype)
    return round_to_int8(quotient if offset is None else quotient + offset.to(x.dtype))


def _example() -> Call:
    qkv, gammas = torch.randn(6, 4 * 64).half(), [torch.rand(64).half() for _ in range(2)]
    angle, slots = torch.rand(6, 64), torch.tensor([7, -1, 0, 8, 9, 11])
    caches = [torch.zeros(3, 2, 4, 32, dtype=torch.int8) for _ in range(2)]
    scales = {"k_scale": torch.rand(1, 64), "v_scale": torch.rand(1, 64)}
    sizes = ([2, 3, 4, 64], [2, 1, 1])
    cosine, sine = angle.cos().half(), angle.sin().half()
    return call(
        qkv, *gammas, cosine, sine, slots, torch.zeros(6, 128).half(), *caches, *sizes, **scales, is_output_qkv=True
    )


@Operator(
    name="npu::npu_qkv_rms_norm_rope_cache",
    source="op-plugin's test of npu_qkv_rms_norm_rope_cache; CANN operator documentation, aclnnQkvRmsNormRopeCache",
    dtypes=(torch.float16,),
    alike=Alike(
        dtype=("qkv", "q_gamma", "k_gamma", "cos", "sin", "q_out", "k_cache", "v_cache"),
        besides={"k_cache": (torch.int8,), "v_cache": (torch.int8,)},
    ),
    examples=(_example,),
)
def npu_qkv_rms_norm_rope_cache(
    qkv: torch.Tensor,
    q_gamma: torch.Tensor,
    k_gamma: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    index: torch.Tensor,
    q_out: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    qkv_size: list[int],
    head_nums: list[int],
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    k_offset: torch.Tensor | None = None,
    v_offset: torch.Tensor | None = None,
    epsilon: float = 1e-6,
    cache_mode: str = "PA_NZ",
    is_output_qkv: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v before quantisation, [B * S, N * D], unless ``is_output_qkv`` empty scalars; ``q_out`` and caches are changed.

    qkv [B * S, (Nq + Nk + Nv) * D]; cos and sin [B * S, D], or [B, D] for all of a sequence; ``qkv_size``: B, S, N, D.
    """
    if cache_mode != "PA_NZ":
        raise unsupported("npu_qkv_rms_norm_rope_cache", "cache_mode", cache_mode, "'PA_NZ'")
    batch, length, _, size = qkv_size
    dtype = compute_dtype(qkv, q_gamma, k_gamma, cos, sin)
    q, k, v = qkv.to(dtype).unflatten(-1, (-1, size)).split(list(head_nums), 1)
    cosine, sine = (
        table.to(dtype).reshape(batch, -1, 1, size).expand(-1, length, -1, -1).flatten(0, 1) for table in (cos, sin)
    )
    normed = (normalise(x, gamma, epsilon, dtype)[0] for x, gamma in ((q, q_gamma), (k, k_gamma)))
    q, k = (x * cosine + rotated(x, "half") * sine for x in normed)
    q_out.copy_(q.reshape(q_out.shape))
    for x, cache, scale, offset in ((k, k_cache, k_scale, k_offset), (v, v_cache, v_scale, v_offset)):
        write_slots(cache, index, _quantised(x, scale, offset).flatten(1), split=True)
    if not is_output_qkv:
        return qkv.new_empty(()), qkv.new_empty(()), qkv.new_empty(())
    q, k, v = (x.flatten(1).to(qkv.dtype).contiguous() for x in (q, k, v))
    return q, k, v


@Operator(
    name="npu::npu_qkv_rms_norm_rope_cache_functional",
    source="op-plugin's test of npu_qkv_rms_norm_rope_cache; CANN operator documentation, aclnnQkvRmsNormRopeCache",
    dtypes=(torch.float16,),
    alike=Alike(
        dtype=("qkv", "q_gamma", "k_gamma", "cos", "sin", "q_out", "k_cache", "v_cache"),
        besides={"k_cache": (torch.int8,), "v_cache": (torch.int8,)},
    ),
    examples=(_example,),
)
def npu_qkv_rms_norm_rope_cache_functional(
    qkv: torch.Tensor,
    q_gamma: torch.Tensor,
    k_gamma: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    index: torch.Tensor,
    q_out: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    qkv_size: list[int],
    head_nums: list[int],
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    k_offset: torch.Tensor | None = None,
    v_offset: torch.Tensor | None = None,
    epsilon: float = 1e-6,
    cache_mode: str = "PA_NZ",
    is_output_qkv: bool = False,
) -> tuple[torch.Tensor, ...]:
    """The results of ``npu_qkv_rms_norm_rope_cache``, and changed copies of ``q_out`` and the caches."""
    q_copy, k_copy, v_copy = (torch.empty_like(given).copy_(given) for given in (q_out, k_cache, v_cache))
    results = npu_qkv_rms_norm_rope_cache(
        qkv,
        q_gamma,
        k_gamma,
        cos,
        sin,
        index,
        q_copy,
        k_copy,
        v_copy,
        qkv_size,
        head_nums,
        k_scale=k_scale,
        v_scale=v_scale,
        k_offset=k_offset,
        v_offset=v_offset,
        epsilon=epsilon,
        cache_mode=cache_mode,
        is_output_qkv=is_output_qkv,
    )
    return *results, q_copy, k_copy, v_copy
