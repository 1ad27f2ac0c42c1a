"""Norm and rotary embedding of keys and values, written to their caches; version 2, and its functional form.

Formula (operator documentation of ``torch_npu.npu_kv_rmsnorm_rope_cache``; op-plugin's test)::

    c_kv   = rms_norm(kv[..., :R], gamma, epsilon)          R elements, as many as gamma has
    k_rope = interleave_rope(kv[..., R:], cos, sin)

or, where ``v`` is given::

    y      = rms_norm(kv, gamma, epsilon)
    k_rope = interleave_rope(y[..., :D], cos, sin), y[..., D:]        D elements, as many as cos has
    c_kv   = v

Both are written to the caches, quantised to ``round(x * scale + offset)`` where a scale is given. ``index`` names the place in
the batch entry's cache (``Norm``, caches [B, 1, S, D]), the slot of each token (``PA``, ``PA_BNSD``, ``PA_NZ``, caches [blocks,
size, 1,
D]), or the first slot of each block (``PA_BLK_BNSD``, ``PA_BLK_NZ``). NZ: the memory of a cache is [blocks, parts, size, E], E
16, or 32 of int8. A negative index is left out.

The first version's documentation calls the caches updated in place, and op-plugin returns the very tensors it was given; the
schema marks neither. Version 2 marks them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from npugraph_ex.operators._alike import Alike
from npugraph_ex.operators._paged_cache import as_split, write_slots
from npugraph_ex.operators._precision import HALVES, compute_dtype, round_to_int8, unsupported
from npugraph_ex.operators._record import Call, Operator, call
from npugraph_ex.operators.npu_interleave_rope import embedded
from npugraph_ex.operators.npu_rms_norm import normalise

_MODES = ("Norm", "PA", "PA_BNSD", "PA_NZ", "PA_BLK_BNSD", "PA_BLK_NZ")


class _Quantiser(NamedTuple):
    scale: torch.Tensor | None
    offset: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.scale is None:
            return x
        quotient = x * self.scale.to(x.dtype)
        return round_to_int8(quotient if self.offset is None else quotient + self.offset.to(x.dtype))


def computed(
    kv: torch.Tensor, gamma: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, v: torch.Tensor | None, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(k_rope, c_kv)`` [B, 1, S, ...] in the precision of the computation."""
    dtype = compute_dtype(kv, gamma, cos, sin)
    if v is None:
        size = gamma.shape[0]
        return embedded(kv[..., size:].to(dtype), cos, sin), normalise(kv[..., :size], gamma, epsilon, dtype)[0]
    y, _ = normalise(kv, gamma, epsilon, dtype)
    size = cos.shape[-1]
    return torch.cat((embedded(y[..., :size], cos, sin), y[..., size:]), -1), v.to(dtype)


def _slots(index: torch.Tensor, batch: int, length: int, size: int, cache_mode: str) -> torch.Tensor:
    """The slot of each token, [B * S]; below 0 where it is not written."""
    if "BLK" not in cache_mode:
        return index.reshape(-1)
    positions = torch.arange(length)
    first = index.reshape(batch, -1)[:, positions // size]
    return torch.where(first >= 0, first // size * size + positions % size, -1).reshape(-1)


def _store(
    operator: str, x: torch.Tensor, cache: torch.Tensor, index: torch.Tensor, cache_mode: str, *, quantised: bool
) -> None:
    batch, _, length, elements = x.shape
    tokens = x.transpose(1, 2).reshape(batch * length, elements)
    if cache_mode == "Norm":
        # Each batch entry is a block of its own.
        places = torch.where(index >= 0, index + torch.arange(batch).unsqueeze(1) * cache.shape[2], -1)
        write_slots(cache.transpose(1, 2), places, tokens)
    elif cache_mode in _MODES:
        slots = _slots(index, batch, length, cache.shape[1], cache_mode)
        split = cache_mode.endswith("NZ")
        view = as_split(cache, 32 if quantised else 16, whole=elements) if split else cache
        write_slots(view, slots, tokens, split=split)
    else:
        raise unsupported(operator, "cache_mode", cache_mode, ", ".join(_MODES))


def _run(
    operator: str,
    x: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None],
    index: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    quantisers: tuple[_Quantiser, _Quantiser],
    epsilon: float,
    cache_mode: str,
    *,
    is_output_kv: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    results = computed(*x, epsilon)
    for result, cache, quantiser in zip(results, caches, quantisers, strict=True):
        _store(operator, quantiser(result), cache, index, cache_mode, quantised=quantiser.scale is not None)
    given = (result.to(x[0].dtype).contiguous() for result in results)
    k_rope, c_kv = given if is_output_kv else map(torch.zeros_like, given)
    return k_rope, c_kv


def _example(cache_mode: str, *, quantised: bool = False) -> Call:
    kv, gamma, cos, sin = (torch.randn(shape).half() for shape in ((2, 1, 3, 96), (64,), (2, 1, 3, 32), (2, 1, 3, 32)))
    shape = (2, 1, 7) if cache_mode == "Norm" else (6, 4, 1)
    index = torch.tensor([[1, 2, 3], [6, 5, 0]]) if cache_mode == "Norm" else torch.tensor([7, -1, 0, 8, 9, 21])
    if "BLK" in cache_mode:
        index = torch.tensor([8, 0])
    caches = [torch.zeros(*shape, size).to(torch.int8 if quantised else torch.half) for size in (32, 64)]
    scales = {"k_rope_scale": torch.rand(32) * 20, "c_kv_scale": torch.rand(64) * 20} if quantised else {}
    scales |= {"k_rope_offset": torch.rand(32), "c_kv_offset": torch.rand(64)} if quantised else {}
    return call(kv, gamma, cos, sin, index, *caches, cache_mode=cache_mode, is_output_kv=True, **scales)


_EXAMPLES = (
    lambda: _example("Norm"),
    lambda: _example("PA"),
    lambda: _example("PA_BLK_BNSD"),
    lambda: _example("PA_BLK_NZ"),
    lambda: _example("PA_NZ", quantised=True),
)


@Operator(
    name="npu::npu_kv_rmsnorm_rope_cache",
    source="operator documentation of torch_npu.npu_kv_rmsnorm_rope_cache; op-plugin; aclnnKvRmsNormRopeCache",
    dtypes=HALVES,
    writes=("k_cache", "ckv_cache"),
    returns_written=(0, 1),
    alike=Alike(
        shape=("cos", "sin"),
        dtype=("kv", "gamma", "cos", "sin", "k_cache", "ckv_cache", "v"),
        besides={"k_cache": (torch.int8,), "ckv_cache": (torch.int8,)},
    ),
    examples=_EXAMPLES,
)
def npu_kv_rmsnorm_rope_cache(
    kv: torch.Tensor,
    gamma: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    index: torch.Tensor,
    k_cache: torch.Tensor,
    ckv_cache: torch.Tensor,
    *,
    k_rope_scale: torch.Tensor | None = None,
    c_kv_scale: torch.Tensor | None = None,
    k_rope_offset: torch.Tensor | None = None,
    c_kv_offset: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    epsilon: float = 1e-5,
    cache_mode: str = "Norm",
    is_output_kv: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(k_cache, ckv_cache, k_rope, c_kv)``: the caches themselves; the values before quantisation, [B, 1, S, ...].

    kv [B, 1, S, R + D], cos and sin [B, 1, S, D]. Without ``is_output_kv`` the device leaves the last
    two unwritten, and they are zeros here.
    """
    quantisers = _Quantiser(k_rope_scale, k_rope_offset), _Quantiser(c_kv_scale, c_kv_offset)
    operands, caches = (kv, gamma, cos, sin, v), (k_cache, ckv_cache)
    results = _run(
        "npu_kv_rmsnorm_rope_cache", operands, index, caches, quantisers, epsilon, cache_mode, is_output_kv=is_output_kv
    )
    return k_cache, ckv_cache, *results


@Operator(
    name="npu::npu_kv_rmsnorm_rope_cache_v2",
    source="operator documentation of torch_npu.npu_kv_rmsnorm_rope_cache; op-plugin; aclnnKvRmsNormRopeCache",
    dtypes=HALVES,
    alike=Alike(
        shape=("cos", "sin"),
        dtype=("kv", "gamma", "cos", "sin", "k_cache", "ckv_cache", "v"),
        besides={"k_cache": (torch.int8,), "ckv_cache": (torch.int8,)},
    ),
    examples=_EXAMPLES,
)
def npu_kv_rmsnorm_rope_cache_v2(
    kv: torch.Tensor,
    gamma: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    index: torch.Tensor,
    k_cache: torch.Tensor,
    ckv_cache: torch.Tensor,
    *,
    k_rope_scale: torch.Tensor | None = None,
    c_kv_scale: torch.Tensor | None = None,
    k_rope_offset: torch.Tensor | None = None,
    c_kv_offset: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    epsilon: float = 1e-5,
    cache_mode: str = "Norm",
    is_output_kv: bool = False,
    k_cache_dtype: int | None = None,
    ckv_cache_dtype: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(k_rope, c_kv)``; the caches are changed."""
    for name, code in (("k_cache_dtype", k_cache_dtype), ("ckv_cache_dtype", ckv_cache_dtype)):
        if code is not None:
            raise unsupported("npu_kv_rmsnorm_rope_cache_v2", name, code, "None, the dtype of the cache itself")
    quantisers = _Quantiser(k_rope_scale, k_rope_offset), _Quantiser(c_kv_scale, c_kv_offset)
    operands, caches = (kv, gamma, cos, sin, v), (k_cache, ckv_cache)
    return _run(
        "npu_kv_rmsnorm_rope_cache_v2",
        operands,
        index,
        caches,
        quantisers,
        epsilon,
        cache_mode,
        is_output_kv=is_output_kv,
    )


@Operator(
    name="npu::npu_kv_rmsnorm_rope_cache_v2_functional",
    source="operator documentation of torch_npu.npu_kv_rmsnorm_rope_cache; op-plugin; aclnnKvRmsNormRopeCache",
    dtypes=HALVES,
    alike=Alike(
        shape=("cos", "sin"),
        dtype=("kv", "gamma", "cos", "sin", "k_cache", "ckv_cache", "v"),
        besides={"k_cache": (torch.int8,), "ckv_cache": (torch.int8,)},
    ),
    examples=_EXAMPLES,
)
def npu_kv_rmsnorm_rope_cache_v2_functional(
    kv: torch.Tensor,
    gamma: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    index: torch.Tensor,
    k_cache: torch.Tensor,
    ckv_cache: torch.Tensor,
    *,
    k_rope_scale: torch.Tensor | None = None,
    c_kv_scale: torch.Tensor | None = None,
    k_rope_offset: torch.Tensor | None = None,
    c_kv_offset: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    epsilon: float = 1e-5,
    cache_mode: str = "Norm",
    is_output_kv: bool = False,
    k_cache_dtype: int | None = None,
    ckv_cache_dtype: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(k_rope, c_kv, k_cache, ckv_cache)`` with changed copies of the caches."""
    k_copy, ckv_copy = (torch.empty_like(cache).copy_(cache) for cache in (k_cache, ckv_cache))
    results = npu_kv_rmsnorm_rope_cache_v2(
        kv,
        gamma,
        cos,
        sin,
        index,
        k_copy,
        ckv_copy,
        k_rope_scale=k_rope_scale,
        c_kv_scale=c_kv_scale,
        k_rope_offset=k_rope_offset,
        c_kv_offset=c_kv_offset,
        v=v,
        epsilon=epsilon,
        cache_mode=cache_mode,
        is_output_kv=is_output_kv,
        k_cache_dtype=k_cache_dtype,
        ckv_cache_dtype=ckv_cache_dtype,
    )
    return *results, k_copy, ckv_copy
