"""GELU activation and quantisation in one operator.

Formula (CANN operator documentation, aclnnGeluQuant)::

    g = gelu(input)                                 approximate="none": by erf; "tanh": by tanh
    quant_mode="static":  y = round(g * input_scale + input_offset)
    quant_mode="dynamic": s = g * input_scale;  out_scale = row_max(abs(s)) / DTYPE_MAX;  y = round(s / out_scale)

DTYPE_MAX is 127 for int8, 448 for float8_e4m3fn, 57344 for float8_e5m2, 32768 for hifloat8, which ``round`` rounds away from zero.
Scale and offset have one element or one for each of the last dimension. Not covered: the rounding ``hybrid`` of hifloat8.
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._hifloat8 import HIFLOAT8, eight_bit, largest_eight_bit
from npugraph_ex.operators._precision import FLOATS, compute_dtype, stored_like, unsupported
from npugraph_ex.operators._record import Operator, call
from npugraph_ex.operators._scalar_types import dtype_of
from npugraph_ex.operators.npu_dynamic_quant import quotient_and_scale
from npugraph_ex.operators.npu_gelu import checked_gelu

_NAME = "npu_gelu_quant"
_OUTPUTS = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)


def _target(quant_mode: str, dst_type: int | torch.dtype | None, round_mode: str) -> torch.dtype:
    """The dtype of the output; raises for what the formula does not cover."""
    hifloat = dst_type == HIFLOAT8
    target = torch.uint8 if hifloat else torch.int8 if dst_type is None else dtype_of(dst_type, _NAME, "dst_type")
    if not hifloat and target not in _OUTPUTS:
        raise unsupported(_NAME, "dst_type", dst_type, f"None, {', '.join(map(str, _OUTPUTS))}, hifloat8 ({HIFLOAT8})")
    if quant_mode not in {"static", "dynamic"}:
        raise unsupported(_NAME, "quant_mode", quant_mode, "'static' and 'dynamic'")
    mode = "round" if hifloat else "rint"
    if round_mode != mode:
        raise unsupported(_NAME, "round_mode", round_mode, f"{mode!r} for this dst_type")
    return target


@Operator(
    name="npu::npu_gelu_quant",
    dtypes=FLOATS,
    source="CANN operator documentation, aclnnGeluQuant",
    absent_on=("A2", "A3"),
    examples=(lambda: call(torch.randn(3, 16).half(), dst_type=1),),
)
def npu_gelu_quant(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    *,
    input_scale: torch.Tensor | None = None,
    input_offset: torch.Tensor | None = None,
    approximate: str = "none",
    quant_mode: str = "dynamic",
    dst_type: int | None = None,
    round_mode: str = "rint",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``(y, out_scale)``: y like ``input``, of 8 bits; out_scale float32 without the last dimension, None if static."""
    target = _target(quant_mode, dst_type, round_mode)
    dtype = compute_dtype(input)
    activated = checked_gelu(_NAME, input.to(dtype), approximate)
    if quant_mode == "dynamic":
        quotient, scale = quotient_and_scale(activated, input_scale, dtype, highest=largest_eight_bit(target))
        return stored_like(input, eight_bit(target, quotient), target), scale.contiguous()
    if input_scale is None:
        raise ValueError(f"{_NAME}: with quant_mode='static' it needs input_scale; pass it.")
    quotient = activated * input_scale.to(dtype)
    if input_offset is not None:
        quotient = quotient + input_offset.to(dtype)
    return stored_like(input, eight_bit(target, quotient), target), None
