"""Symmetric dynamic quantisation to int8, one scale a token.

Formula (CANN operator documentation, aclnnDynamicQuant)::

    input = x * smooth_scales                       (x when there are none)
    scale = row_max(abs(input)) / 127
    y     = round(input / scale)                    half to even, saturated

A row is the last dimension. A row of zeros has scale 0 and quantises to zeros (see ``round_to_int8``).
Covered: int8 output, per-token mode, one smoothing vector. Not covered: int4 and 8-bit floating outputs, groups
(mixture of experts), ``pertensor`` and ``perchannel`` modes, a custom maximum.
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._precision import INT8_MAX, compute_dtype, round_to_int8, stored_like, unsupported
from npugraph_ex.operators._record import Operator, call
from npugraph_ex.operators._scalar_types import dtype_of

_NAME = "npu_dynamic_quant"


def quotient_and_scale(
    x: torch.Tensor, smooth_scales: torch.Tensor | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(input / scale, scale)`` in ``dtype``: the shape of ``x``, and that shape without its last dimension."""
    wide = x.to(dtype)
    if smooth_scales is not None:
        wide = wide * smooth_scales.to(dtype)
    if wide.shape[-1] == 0:
        return wide, wide.new_zeros(wide.shape[:-1])
    scale = wide.abs().amax(dim=-1) / INT8_MAX
    return wide / scale.unsqueeze(-1), scale


def before_rounding(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    *,
    smooth_scales: torch.Tensor | None = None,
    group_index: torch.Tensor | None = None,
    dst_type: int | None = None,
    quant_mode: str = "pertoken",
    dst_type_max: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(input / scale, scale)``, both float32, or float64 for float64 inputs."""
    if group_index is not None:
        raise unsupported(_NAME, "group_index", "a tensor", "None")
    if dst_type is not None and dtype_of(dst_type, _NAME, "dst_type") != torch.int8:
        raise unsupported(_NAME, "dst_type", dst_type, "None and torch.int8")
    if quant_mode != "pertoken":
        raise unsupported(_NAME, "quant_mode", quant_mode, "'pertoken'")
    if dst_type_max != 0.0:
        raise unsupported(_NAME, "dst_type_max", dst_type_max, "0.0")
    if input.dim() < 2:
        raise ValueError(f"{_NAME}: input must have 2 to 8 dimensions; it has shape {tuple(input.shape)}.")
    return quotient_and_scale(input, smooth_scales, compute_dtype(input, smooth_scales))


@Operator(
    name="npu::npu_dynamic_quant",
    source="CANN operator documentation, aclnnDynamicQuant",
    before_rounding=before_rounding,
    synonyms={"dst_type": {1: None}},
    examples=(lambda: call(torch.randn(3, 16).half()),),
)
def npu_dynamic_quant(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    *,
    smooth_scales: torch.Tensor | None = None,
    group_index: torch.Tensor | None = None,
    dst_type: int | None = None,
    quant_mode: str = "pertoken",
    dst_type_max: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(y, scale)``: y int8 of the shape of ``input``; scale float32, that shape without its last dimension."""
    quotient, scale = before_rounding(
        input,
        smooth_scales=smooth_scales,
        group_index=group_index,
        dst_type=dst_type,
        quant_mode=quant_mode,
        dst_type_max=dst_type_max,
    )
    return stored_like(input, round_to_int8(quotient), torch.int8), scale.contiguous()
