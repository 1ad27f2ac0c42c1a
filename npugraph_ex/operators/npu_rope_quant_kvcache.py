"""Rotary embedding and quantisation of keys and values, written to their caches; and of an int32 projection, dequantised first.

Formula (CANN operator documentation, aclnnDequantRopeQuantKvcache; ops-transformer)::

    x       = x * weight_scale * activation_scale       of the int32 one; an int32 bias is added before, another one after
    q, k, v = x split by size_splits
    q, k    = q * cos + rotate_half(q) * sin,  k likewise
    cache   = round(k / scale_k + offset_k),  v likewise

With ``cache_mode`` contiguous, caches are [B, S, N, D], and ``indices[b]`` is where the sequence's tokens begin; with ``page``
they are [blocks, size, N, D], and ``indices`` names the slot of each token, a negative one none.

The documentation calls the caches updated in place, and op-plugin returns the very tensors it was given; the schemas mark neither.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from npugraph_ex.operators._alike import Alike
from npugraph_ex.operators._paged_cache import write_slots
from npugraph_ex.operators._precision import HALVES, compute_dtype, round_to_int8, unsupported
from npugraph_ex.operators._record import Call, Operator, call
from npugraph_ex.operators.npu_rotary_mul import rotated


class _Cache(NamedTuple):
    memory: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor | None


def _embed_and_store(
    operator: str,
    x: torch.Tensor,
    table: tuple[torch.Tensor, torch.Tensor],
    caches: tuple[_Cache, _Cache],
    indices: torch.Tensor,
    size_splits: list[int],
    cache_mode: str,
    *,
    kv_output: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """All that follows the dequantisation; ``x`` [B, S, H] or [B, H] in the precision of the computation."""
    if cache_mode not in {"contiguous", "page"}:
        raise unsupported(operator, "cache_mode", cache_mode, "'contiguous' and 'page'")
    size = caches[0].memory.shape[-1]
    q, k, v = (part.unflatten(-1, (-1, size)) for part in x.split(list(size_splits), -1))
    cosine, sine = (angle.to(x.dtype).reshape(*x.shape[:-1], 1, size) for angle in table)
    q, k = (part * cosine + rotated(part, "half") * sine for part in (q, k))
    slots = indices.reshape(-1)
    if cache_mode == "contiguous":
        length = x.shape[1] if x.dim() == 3 else 1
        first = slots.long() + torch.arange(len(slots)) * caches[0].memory.shape[1]
        slots = (first.unsqueeze(1) + torch.arange(length)).reshape(-1)
    for part, cache in ((k, caches[0]), (v, caches[1])):
        quotient = part / cache.scale.to(x.dtype).reshape(-1, size)
        if cache.offset is not None:
            quotient = quotient + cache.offset.to(x.dtype).reshape(-1, size)
        write_slots(cache.memory, slots, round_to_int8(quotient).flatten(0, -3))
    dtype = table[0].dtype
    empty = x.new_empty(0, dtype=dtype)
    k, v = (part.to(dtype).contiguous() if kv_output else empty for part in (k, v))
    return q.to(dtype).contiguous(), k, v, caches[0].memory, caches[1].memory


def _refuse(operator: str, quant_mode: int, input_layout: str) -> None:
    if quant_mode != 0:
        raise unsupported(operator, "quant_mode", quant_mode, "0, static quantisation")
    if input_layout != "BSND":
        raise unsupported(operator, "input_layout", input_layout, "'BSND'")


def _example(cache_mode: str) -> Call:
    x, (cos, sin) = torch.randn(2, 3, 4 * 16).half(), (torch.rand(2, 3, 1, 16).half() for _ in range(2))
    caches = [torch.zeros(4, 6, 1, 16, dtype=torch.int8) for _ in range(2)]
    indices = torch.tensor([1, 3] if cache_mode == "contiguous" else [1, 3, 23, 8, 9, -1], dtype=torch.int32)
    scales = [torch.rand(16) + 0.1 for _ in range(2)]
    return call(x, cos, sin, *caches, indices, *scales, [32, 16, 16], kv_output=True, cache_mode=cache_mode)


@Operator(
    name="npu::npu_rope_quant_kvcache",
    source="CANN operator documentation, aclnnDequantRopeQuantKvcache; op-plugin",
    dtypes=HALVES,
    writes=("k_cache", "v_cache"),
    returns_written=(3, 4),
    alike=Alike(dtype=("x", "cos", "sin")),
    examples=(lambda: _example("contiguous"), lambda: _example("page")),
)
def npu_rope_quant_kvcache(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    indices: torch.Tensor,
    scale_k: torch.Tensor,
    scale_v: torch.Tensor,
    size_splits: list[int],
    *,
    offset_k: torch.Tensor | None = None,
    offset_v: torch.Tensor | None = None,
    quant_mode: int = 0,
    input_layout: str = "BSND",
    kv_output: bool = False,
    cache_mode: str = "contiguous",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(q, k, v, k_cache, v_cache)``: [B, S, N, D] or [B, N, D]; k and v empty unless ``kv_output``; the caches themselves.

    x [B, S, H] or [B, H]; cos and sin with a D for each token; int8 caches; scales and offsets [N * D] of float32.
    """
    _refuse("npu_rope_quant_kvcache", quant_mode, input_layout)
    caches = _Cache(k_cache, scale_k, offset_k), _Cache(v_cache, scale_v, offset_v)
    wide = x.to(compute_dtype(x, cos, sin))
    return _embed_and_store(
        "npu_rope_quant_kvcache", wide, (cos, sin), caches, indices, size_splits, cache_mode, kv_output=kv_output
    )


def _int32_example() -> Call:
    given, kwargs = _example("contiguous")
    x = torch.randint(-99, 99, (2, 3, 64), dtype=torch.int32)
    dequant = {"weight_scale": torch.rand(64) / 9, "activation_scale": torch.rand(6), "bias": torch.randn(64).half()}
    return call(x, *given[1:], **kwargs, **dequant)


@Operator(
    name="npu::npu_dequant_rope_quant_kvcache",
    source="CANN operator documentation, aclnnDequantRopeQuantKvcache; op-plugin",
    dtypes=HALVES,
    writes=("k_cache", "v_cache"),
    returns_written=(3, 4),
    alike=Alike(dtype=("cos", "sin")),
    examples=(_int32_example,),
)
def npu_dequant_rope_quant_kvcache(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    indices: torch.Tensor,
    scale_k: torch.Tensor,
    scale_v: torch.Tensor,
    size_splits: list[int],
    *,
    offset_k: torch.Tensor | None = None,
    offset_v: torch.Tensor | None = None,
    weight_scale: torch.Tensor | None = None,
    activation_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    quant_mode: int = 0,
    input_layout: str = "BSND",
    kv_output: bool = False,
    cache_mode: str = "contiguous",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """As ``npu_rope_quant_kvcache``, of an int32 ``x``.

    ``weight_scale`` and ``bias`` [H], ``activation_scale`` one for each token.
    """
    _refuse("npu_dequant_rope_quant_kvcache", quant_mode, input_layout)
    dtype = compute_dtype(cos, sin, weight_scale)
    whole = bias if bias is not None and bias.dtype == torch.int32 else None
    wide = (x if whole is None else x + whole).to(dtype)
    if weight_scale is not None:
        wide = wide * weight_scale.to(dtype)
    if activation_scale is not None:
        wide = wide * activation_scale.to(dtype).reshape(*x.shape[:-1], 1)
    if bias is not None and whole is None:
        wide = wide + bias.to(dtype)
    caches = _Cache(k_cache, scale_k, offset_k), _Cache(v_cache, scale_v, offset_v)
    return _embed_and_store(
        "npu_dequant_rope_quant_kvcache",
        wide,
        (cos, sin),
        caches,
        indices,
        size_splits,
        cache_mode,
        kv_output=kv_output,
    )
