"""Products of int8 operands, which are int32, scaled back to floating point.

Formula (CANN operator documentation, aclnnDequantBias)::

    y = x * weight_scale * activation_scale + bias          a floating-point bias
    y = (x + bias) * weight_scale * activation_scale        an int32 bias
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._precision import compute_dtype, stored_like, unsupported
from npugraph_ex.operators._record import Operator, call

_NAME = "npu_dequant_bias"


@Operator(
    name="npu::npu_dequant_bias",
    source="CANN operator documentation, aclnnDequantBias",
    dtypes=(torch.float32,),
    examples=(
        lambda: call(torch.randint(-99, 99, (3, 8), dtype=torch.int32), torch.rand(8), torch.rand(3), torch.rand(8)),
        lambda: call(
            torch.randint(-99, 99, (3, 8), dtype=torch.int32),
            torch.rand(8).bfloat16(),
            None,
            torch.ones(8, dtype=torch.int32),
            output_dtype=torch.bfloat16,
        ),
    ),
)
def npu_dequant_bias(
    x: torch.Tensor,
    weight_scale: torch.Tensor,
    activation_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    *,
    output_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """[M, N] of ``output_dtype`` (float16 by default) from x [M, N] int32, weight_scale [N], activation_scale [M], bias [N]."""
    target = output_dtype or torch.float16
    if target not in (torch.float16, torch.bfloat16):
        raise unsupported(_NAME, "output_dtype", output_dtype, "None, torch.float16 and torch.bfloat16")
    if x.dim() != 2 or x.dtype != torch.int32:
        raise ValueError(f"{_NAME}: x must be [M, N] of int32; it is {list(x.shape)} of {x.dtype}.")
    dtype = compute_dtype(weight_scale, activation_scale, bias)
    whole = bias is not None and not bias.is_floating_point()
    wide = x.to(dtype) if bias is None or not whole else (x + bias).to(dtype)
    wide = wide * weight_scale.to(dtype)
    if activation_scale is not None:
        wide = wide * activation_scale.to(dtype).unsqueeze(-1)
    if bias is not None and not whole:
        wide = wide + bias.to(dtype)
    return stored_like(x, wide, target)
