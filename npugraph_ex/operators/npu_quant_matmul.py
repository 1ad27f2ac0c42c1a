"""Matrix product of int8 operands, scaled back to floating point or requantised to int8.

Formula (CANN operator documentation, aclnnQuantMatmulV4), with ``scale`` per tensor or per column and
``pertoken_scale`` per row::

    bias int32:     out = (x1 @ x2 + bias) * scale [* pertoken_scale] [+ offset]
    bias floating:  out = x1 @ x2 * scale [* pertoken_scale] + bias

Covered: int8 x int8; float32, bfloat16 (or float64) ``scale``; int8, float16, bfloat16 and float32 outputs.
Not covered: int4 and 8-bit floating operands, int64 encoded scales, int32 output, group and output scales.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from npugraph_ex.operators._precision import compute_dtype, round_to_int8, unsupported
from npugraph_ex.operators._record import Operator, call
from npugraph_ex.operators._scalar_types import dtype_of

_NAME = "npu_quant_matmul"
_FLOATING_OUTPUTS = (torch.float16, torch.bfloat16, torch.float32)


def _refuse_uncovered(x1: torch.Tensor, x2: torch.Tensor, scale: torch.Tensor, **only_none: object) -> None:
    """Raise for the operand and argument values that the formula above does not cover."""
    for name, operand in (("x1", x1), ("x2", x2)):
        if operand.dtype != torch.int8:
            raise unsupported(_NAME, name, operand.dtype, "int8 tensors")
    if not scale.is_floating_point():
        raise unsupported(_NAME, "scale", scale.dtype, "floating-point tensors")
    for name, value in only_none.items():
        if value is not None:
            raise unsupported(_NAME, name, "a tensor" if isinstance(value, torch.Tensor) else value, "None")


def _output_dtype(output_dtype: int | None) -> torch.dtype:
    """The dtype of the result: int8 by default."""
    if output_dtype is None:
        return torch.int8
    dtype = dtype_of(output_dtype, _NAME, "output_dtype")
    if dtype != torch.int8 and dtype not in _FLOATING_OUTPUTS:
        raise unsupported(_NAME, "output_dtype", dtype, "int8, float16, bfloat16 and float32")
    return dtype


def before_rounding(
    x1: torch.Tensor,
    x2: torch.Tensor,
    scale: torch.Tensor,
    *,
    offset: torch.Tensor | None = None,
    pertoken_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    output_dtype: int | None = None,
    x1_dtype: int | None = None,
    x2_dtype: int | None = None,
    pertoken_scale_dtype: int | None = None,
    scale_dtype: int | None = None,
    group_sizes: Sequence[int] | None = None,
    y_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """The result before it is rounded to int8; a floating result is rounded to ``output_dtype`` as usual."""
    _refuse_uncovered(
        x1, x2, scale, x1_dtype=x1_dtype, x2_dtype=x2_dtype, pertoken_scale_dtype=pertoken_scale_dtype,
        scale_dtype=scale_dtype, group_sizes=group_sizes or None, y_scale=y_scale,
    )  # fmt: skip
    target = _output_dtype(output_dtype)
    dtype = compute_dtype(scale, pertoken_scale, bias, offset)
    # Sums of int8 products are below 2**53 for every documented size, so float64 holds them exactly.
    total = torch.matmul(x1.to(torch.float64), x2.to(torch.float64))
    if bias is not None and not bias.is_floating_point():
        total = total + bias.to(torch.float64)
    out = total.to(dtype) * scale.to(dtype)
    if pertoken_scale is not None:
        out = out * pertoken_scale.to(dtype).unsqueeze(-1)
    if bias is not None and bias.is_floating_point():
        out = out + bias.to(dtype)
    if offset is not None:
        out = out + offset.to(dtype)
    keep_wide = target == torch.int8 or dtype == torch.float64
    return out if keep_wide else out.to(target)


def _small(*size: int) -> torch.Tensor:
    return torch.randint(-8, 8, size, dtype=torch.int8)


@Operator(
    name="npu::npu_quant_matmul",
    source="CANN operator documentation, aclnnQuantMatmulV4",
    before_rounding=before_rounding,
    synonyms={"output_dtype": {1: None}},
    first_factor=0,
    examples=(lambda: call(_small(3, 16), _small(16, 8), torch.rand(8) + 0.5, output_dtype=torch.bfloat16),),
)
def npu_quant_matmul(
    x1: torch.Tensor,
    x2: torch.Tensor,
    scale: torch.Tensor,
    *,
    offset: torch.Tensor | None = None,
    pertoken_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    output_dtype: int | None = None,
    x1_dtype: int | None = None,
    x2_dtype: int | None = None,
    pertoken_scale_dtype: int | None = None,
    scale_dtype: int | None = None,
    group_sizes: Sequence[int] | None = None,
    y_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """``x1`` (..., m, k) times ``x2`` (..., k, n), scaled: (..., m, n) of ``output_dtype``, int8 when None.

    scale, offset: (1,) or (n,); pertoken_scale: (m,) float32; bias: (n,), (1, n) or (batch, 1, n).
    """
    out = before_rounding(
        x1, x2, scale, offset=offset, pertoken_scale=pertoken_scale, bias=bias, output_dtype=output_dtype,
        x1_dtype=x1_dtype, x2_dtype=x2_dtype, pertoken_scale_dtype=pertoken_scale_dtype, scale_dtype=scale_dtype,
        group_sizes=group_sizes, y_scale=y_scale,
    )  # fmt: skip
    return round_to_int8(out) if _output_dtype(output_dtype) == torch.int8 else out
