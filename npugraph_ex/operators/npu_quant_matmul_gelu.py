"""Matrix product of int8 or int4 operands, scaled back, and GELU.

Formula (operator documentation of ``torch_npu.npu_quant_matmul_gelu``)::

    bias int32:      y = (x1 @ x2 + bias) * x2_scale * x1_scale
    bias floating:   y = x1 @ x2 * x2_scale * x1_scale + bias
    out = y * (1 + erf(y / sqrt(2))) / 2 with "gelu_erf", its approximation by tanh with "gelu_tanh"
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._precision import compute_dtype, gelu, unsupported
from npugraph_ex.operators._record import Operator, call
from npugraph_ex.operators.npu_quant_matmul import before_rounding

_NAME = "npu_quant_matmul_gelu"
_FORMS = {"gelu_erf": "none", "gelu_tanh": "tanh"}


def _small(*size: int) -> torch.Tensor:
    return torch.randint(-8, 8, size, dtype=torch.int8)


@Operator(
    name="npu::npu_quant_matmul_gelu",
    source="operator documentation of torch_npu.npu_quant_matmul_gelu",
    dtypes=(torch.float32,),
    first_factor=0,
    examples=(
        lambda: call(_small(3, 16), _small(16, 8), torch.rand(3), torch.rand(8), bias=torch.randn(8)),
        lambda: call(_small(3, 16), _small(16, 8), torch.rand(3), torch.rand(8).bfloat16(), approximate="gelu_tanh"),
    ),
)
def npu_quant_matmul_gelu(
    x1: torch.Tensor,
    x2: torch.Tensor,
    x1_scale: torch.Tensor,
    x2_scale: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    approximate: str | None = "gelu_erf",
) -> torch.Tensor:
    """[..., m, n]: bfloat16 where x2_scale is, else float16. x1, x2: as in quant_matmul; x1_scale: [m]; x2_scale: [1] or [n]."""
    form = _FORMS.get(approximate or "gelu_erf")
    if form is None:
        raise unsupported(_NAME, "approximate", approximate, "'gelu_erf' and 'gelu_tanh'")
    wide = compute_dtype(x1_scale, x2_scale, bias)
    scale, own_bias = x2_scale.to(wide), bias if bias is None or not bias.is_floating_point() else bias.to(wide)
    y = before_rounding(x1, x2, scale, pertoken_scale=x1_scale.to(wide), bias=own_bias, output_dtype=torch.float32)  # type: ignore[arg-type]
    out = gelu(y, form)
    if wide == torch.float64:
        return out
    return out.to(torch.bfloat16 if x2_scale.dtype == torch.bfloat16 else torch.float16)
