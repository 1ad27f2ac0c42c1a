"""Keys and values of new tokens, written to the slots of a paged cache: `_npu_reshape_and_cache`, and of one cache alone.

Formula (ATB library, ReshapeAndCache)::

    cache[slot // size, slot % size] = token        for each token and its slot; a negative slot is left out

A cache is [blocks, size, N, D], or in layout NZ [blocks, N * D / E, size, E] with E elements in 32 bytes.
"""

from __future__ import annotations

import math

import torch

from npugraph_ex.operators._paged_cache import is_split, write_slots
from npugraph_ex.operators._precision import HALVES
from npugraph_ex.operators._record import Call, Operator, call


def _example() -> Call:
    tokens, caches = ([torch.randn(shape).half() for _ in range(2)] for shape in ((3, 2, 16), (5, 4, 2, 16)))
    return call(*tokens, *caches, torch.tensor([7, -1, 16], dtype=torch.int32))


def _single() -> Call:
    key, _, key_cache, _, slots = _example().args
    return call(key, key_cache, slots)


@Operator(
    name="atb::_npu_reshape_and_cache",
    source="op-plugin, ops/atb/ReshapeAndCachAtb.cpp; ATB library, ReshapeAndCache",
    dtypes=(*HALVES, torch.int8),
    writes_by_index=True,
    examples=(_example,),
)
def npu_reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_indices: torch.Tensor,
) -> None:
    """Key [T, N, Dk] and value [T, N, Dv] of float16, bfloat16 or int8; ``slot_indices`` [T] of int32."""
    npu_reshape_and_cache_siso(key, key_cache, slot_indices)
    npu_reshape_and_cache_siso(value, value_cache, slot_indices)


@Operator(
    name="atb::_npu_reshape_and_cache_siso",
    source="op-plugin, ops/atb/ReshapeAndCacheSisoAtb.cpp; ATB library, ReshapeAndCache, K_CACHE_V_BYPASS",
    dtypes=(*HALVES, torch.int8),
    writes_by_index=True,
    examples=(_single,),
)
def npu_reshape_and_cache_siso(key: torch.Tensor, key_cache: torch.Tensor, slot_indices: torch.Tensor) -> None:
    """As ``_npu_reshape_and_cache``, of one cache."""
    split = is_split(key_cache, key.shape[1], math.prod(key.shape[2:]))
    write_slots(key_cache, slot_indices, key, split=split)
