"""SwiGLU activation and dynamic int8 quantisation in one operator.

Formula (operator documentation of ``torch_npu.npu_swiglu_quant``; CANN's aclnnSwiGluQuant for quant_mode 1)::

    A, B  = the halves of the last dimension of x; the activated half A is the first with activate_left, else the second
    s     = A * sigmoid(A) * B
    scale = row_max(abs(s)) / 127
    out   = round(s / scale)                        half to even, saturated

Nothing is rounded before the quotient, unlike in ``npu_swiglu`` followed by ``npu_dynamic_quant``.
Covered: dynamic quantisation to int8 without groups and smoothing. Not covered: static quantisation, int4, groups.
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._precision import compute_dtype, rounded, unsupported
from npugraph_ex.operators._record import Operator, call
from npugraph_ex.operators._scalar_types import dtype_of
from npugraph_ex.operators.npu_dynamic_quant import quotient_and_scale

_NAME = "npu_swiglu_quant"
_DYNAMIC = 1


def _refuse_uncovered(quant_mode: int, group_list_type: int, dst_type: object, **only_none: object) -> None:
    """Raise for argument values that the formula does not cover."""
    for name, value in only_none.items():
        if value is not None:
            raise unsupported(_NAME, name, "a tensor", "None")
    if quant_mode != _DYNAMIC:
        raise unsupported(_NAME, "quant_mode", quant_mode, "1 (dynamic)")
    if group_list_type != 0:
        raise unsupported(_NAME, "group_list_type", group_list_type, "0")
    if dst_type is not None and dtype_of(dst_type, _NAME, "dst_type") != torch.int8:  # type: ignore[arg-type]
        raise unsupported(_NAME, "dst_type", dst_type, "None and torch.int8")


def before_rounding(
    x: torch.Tensor,
    *,
    smooth_scales: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
    group_index: torch.Tensor | None = None,
    activate_left: bool = False,
    quant_mode: int = 0,
    group_list_type: int = 0,
    dst_type: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(s / scale, scale)``, both float32, or float64 for float64 inputs."""
    _refuse_uncovered(
        quant_mode, group_list_type, dst_type, smooth_scales=smooth_scales, offsets=offsets, group_index=group_index
    )
    if x.dim() < 2 or x.shape[-1] % 2:
        raise ValueError(
            f"{_NAME}: x must have 2 or more dimensions, the last of even size; it has shape {tuple(x.shape)}."
        )
    dtype = compute_dtype(x)
    first, second = x.to(dtype).chunk(2, dim=-1)
    active, other = (first, second) if activate_left else (second, first)
    quotient, scale = quotient_and_scale(active * torch.sigmoid(active) * other, None, dtype)
    return quotient.contiguous(), scale.contiguous()


npu_swiglu_quant = Operator(
    name="npu::npu_swiglu_quant",
    source="operator documentation of torch_npu.npu_swiglu_quant; CANN operator documentation, aclnnSwiGluQuant",
    before_rounding=before_rounding,
    synonyms={"dst_type": {1: None}},
    examples=(lambda: call(torch.randn(3, 16).half(), activate_left=True, quant_mode=1),),
)(rounded(before_rounding, results=1))
"""``(out, scale)``: out int8, half of ``x`` along its last dimension; scale float32, without that dimension."""
