"""Matrices of packed int4, scales encoded for the cube unit's output, and exact products of integers."""

from __future__ import annotations

import torch

from npugraph_ex.operators._int4 import unpack
from npugraph_ex.operators._precision import compute_dtype


def matrix_of(weight: torch.Tensor, k: int) -> torch.Tensor:
    """``weight`` [..., k, n] with int4 unpacked: int32 [..., k, n / 8], or [..., k / 8, n] transposed from [..., n, k / 8]."""
    if weight.dtype != torch.int32:
        return weight
    return unpack(weight) if weight.shape[-2] == k else unpack(weight.mT).mT


def scale_of(scale: torch.Tensor) -> torch.Tensor:
    """``scale``, floating; an int64 one, from ``npu_trans_quant_param``, holds the bits of a float32 in its lower half."""
    if scale.is_floating_point():
        return scale
    low = scale.to(torch.int64).bitwise_and(0xFFFFFFFF)
    return torch.where(low >= 2**31, low - 2**32, low).to(torch.int32).view(torch.float32)


def offset_of(scale: torch.Tensor) -> torch.Tensor | None:
    """The offset in bits 37 to 45 of an int64 ``scale``, a signed whole number; None for a floating scale."""
    if scale.is_floating_point():
        return None
    bits = (scale.to(torch.int64) >> 37).bitwise_and(0x1FF)
    return torch.where(bits > 255, bits - 512, bits).to(torch.float32)


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x @ weight`` in float64: exact for integers, whose sums stay below 2**53 for every documented size."""
    return torch.matmul(x.to(torch.float64), weight.to(torch.float64))


def in_groups(weight: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor | None = None) -> torch.Tensor:
    """``(weight - offset) * scale`` for [k, n] with a scale and an offset for each of [groups, n], groups of rows of k."""
    k, groups = weight.shape[-2], scale.shape[-2]
    wide = compute_dtype(scale)
    size = -(-k // groups)
    rows = torch.arange(k, device=weight.device) // size
    values = weight.to(wide)
    if offset is not None:
        values = values - offset.to(wide)[..., rows, :]
    return values * scale.to(wide)[..., rows, :]
