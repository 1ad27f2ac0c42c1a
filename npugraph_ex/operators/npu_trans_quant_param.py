"""Encodes a scale, and an offset, for the output stage of the cube unit.

Formula (operator documentation of ``torch_npu.npu_trans_quant_param``), on the bits of ``scale`` as float32::

    out = scale & 0xFFFFE000 | 1 << 46                             with round_mode 1 scale is rounded to its 19 upper bits first
    out = out | (round(offset) in [-256, 255] & 0x1FF) << 37       where there is an offset
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._alike import Alike
from npugraph_ex.operators._precision import unsupported
from npugraph_ex.operators._record import Operator, call

_NAME = "npu_trans_quant_param"
_KEPT = 0xFFFFE000
_HALF, _LAST_KEPT = 0xFFF, 13


def _kept_bits(scale: torch.Tensor, *, rounded: bool) -> torch.Tensor:
    """The 19 upper bits of each float32, as int64; rounded half to even, or cut off."""
    bits = scale.to(torch.float32).contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    if rounded:
        bits = bits + _HALF + ((bits >> _LAST_KEPT) & 1)
    return bits & _KEPT


@Operator(
    name="npu::npu_trans_quant_param",
    source="operator documentation of torch_npu.npu_trans_quant_param",
    dtypes=(torch.float32,),
    alike=Alike(dtype=("scale", "offset")),
    examples=(lambda: call(torch.rand(1), torch.randn(4)), lambda: call(torch.rand(1, 4), round_mode=1)),
)
def npu_trans_quant_param(
    scale: torch.Tensor, offset: torch.Tensor | None = None, round_mode: int | None = 0
) -> torch.Tensor:
    """int64 of the shape of scale, or of offset where scale is [1]. scale, offset: float32, [1], [n] or [1, n]."""
    if round_mode not in {None, 0, 1}:
        raise unsupported(_NAME, "round_mode", round_mode, "0 and 1")
    out = _kept_bits(scale, rounded=round_mode == 1) | (1 << 46)
    if offset is None:
        return out
    return out | ((offset.round().clamp(-256, 255).to(torch.int64) & 0x1FF) << 37)
