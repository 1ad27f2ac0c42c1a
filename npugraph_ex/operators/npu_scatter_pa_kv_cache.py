"""Keys and values of new tokens, written to the slots of a paged cache; of keys alone; and functionally.

Formula (operator documentation of ``torch_npu.npu_scatter_pa_kv_cache``)::

    cache[slot // size, slot % size] = token        for each token and its slot; a negative slot is left out

A cache is [blocks, size, N, D], or [blocks, N * D / E, size, E] in layout NZ (``PA_NZ``); its shape tells which. Not covered, and
refused by name: compressed sequences.
"""

from __future__ import annotations

import math

import torch

from npugraph_ex.operators._alike import Alike
from npugraph_ex.operators._paged_cache import is_split, write_slots
from npugraph_ex.operators._precision import HALVES, unsupported
from npugraph_ex.operators._record import Call, Operator, call


def _write(operator: str, token: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, **compression: object) -> None:
    for name, value in compression.items():
        if value is not None:
            raise unsupported(operator, name, "a value", "None")
    if token.dim() != 3:
        raise unsupported(operator, "key", tuple(token.shape), "tensors [T, N, D]")
    write_slots(cache, slots, token, split=is_split(cache, token.shape[1], math.prod(token.shape[2:])))


def _example(**kwargs: str) -> Call:
    tokens, caches = ([torch.randn(shape).half() for _ in range(2)] for shape in ((3, 2, 16), (5, 4, 2, 16)))
    return call(*tokens, *caches, torch.tensor([7, 2, 16], dtype=torch.int32), **kwargs)


_DTYPES = (
    *(*HALVES, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int8, torch.uint8, torch.int16, torch.int32),
)


@Operator(
    name="npu::npu_scatter_pa_kv_cache",
    source="operator documentation of torch_npu.npu_scatter_pa_kv_cache",
    dtypes=_DTYPES,
    writes_by_index=True,
    alike=Alike(dtype=("key", "value", "key_cache", "value_cache")),
    examples=(lambda: _example(cache_mode="Norm"), _example),
)
def npu_scatter_pa_kv_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    compress_lens: torch.Tensor | None = None,
    compress_seq_offsets: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    cache_mode: str | None = "PA_NZ",
) -> None:
    """Key [T, N, Dk] and value [T, N, Dv]; ``slot_mapping`` [T] of int32 or int64."""
    compression = {"compress_lens": compress_lens, "compress_seq_offsets": compress_seq_offsets, "seq_lens": seq_lens}
    if cache_mode not in {None, "Norm", "PA_NZ"}:
        raise unsupported("npu_scatter_pa_kv_cache", "cache_mode", cache_mode, "'Norm' and 'PA_NZ'")
    _write("npu_scatter_pa_kv_cache", key, key_cache, slot_mapping, **compression)
    _write("npu_scatter_pa_kv_cache", value, value_cache, slot_mapping, **compression)


@Operator(
    name="npu::npu_scatter_pa_kv_cache_functional",
    source="operator documentation of torch_npu.npu_scatter_pa_kv_cache; op-plugin",
    dtypes=_DTYPES,
    writes_by_index=True,
    alike=Alike(dtype=("key", "value", "key_cache", "value_cache")),
    examples=(_example,),
)
def npu_scatter_pa_kv_cache_functional(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    compress_lens: torch.Tensor | None = None,
    compress_seq_offsets: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    cache_mode: str | None = "PA_NZ",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Changed copies of both caches."""
    copies = torch.empty_like(key_cache).copy_(key_cache), torch.empty_like(value_cache).copy_(value_cache)
    npu_scatter_pa_kv_cache(
        key,
        value,
        *copies,
        slot_mapping,
        compress_lens=compress_lens,
        compress_seq_offsets=compress_seq_offsets,
        seq_lens=seq_lens,
        cache_mode=cache_mode,
    )
    return copies


@Operator(
    name="npu::npu_scatter_pa_cache.value",
    source="op-plugin's test of npu_scatter_pa_cache; CANN operator documentation, aclnnScatterPaCache",
    dtypes=(*HALVES, torch.float32, torch.int8, torch.int32),
    writes_by_index=True,
    alike=Alike(dtype=("key", "key_cache")),
    examples=(
        lambda: call(torch.randn(2, 2, 16).half(), torch.tensor([7, 0]), key_cache=torch.randn(5, 4, 2, 16).half()),
    ),
)
def npu_scatter_pa_cache(
    key: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    compress_lens: torch.Tensor | None = None,
    compress_seq_offsets: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    key_cache: torch.Tensor,
) -> torch.Tensor:
    """``key_cache`` itself, changed."""
    compression = {"compress_lens": compress_lens, "compress_seq_offsets": compress_seq_offsets, "seq_lens": seq_lens}
    _write("npu_scatter_pa_cache", key, key_cache, slot_mapping, **compression)
    return key_cache
