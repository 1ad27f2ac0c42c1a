"""Batched matrix product of int8 operands, scaled back, and summed over the batch.

Formula (operator documentation of ``torch_npu.npu_quant_matmul_reduce_sum``)::

    out = sum over i of (x1[i] @ x2[i]) * x1_scale[i, :, None] * x2_scale
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._integers import product
from npugraph_ex.operators._precision import compute_dtype, unsupported
from npugraph_ex.operators._record import Operator, call

_NAME = "npu_quant_matmul_reduce_sum"


@Operator(
    name="npu::npu_quant_matmul_reduce_sum",
    source="operator documentation of torch_npu.npu_quant_matmul_reduce_sum",
    dtypes=(torch.float32,),
    examples=(
        lambda: call(
            torch.randint(-8, 8, (2, 3, 16)).to(torch.int8),
            torch.randint(-8, 8, (2, 16, 8)).to(torch.int8),
            x1_scale=torch.rand(2, 3),
            x2_scale=torch.rand(8).bfloat16(),
        ),
    ),
)
def npu_quant_matmul_reduce_sum(
    x1: torch.Tensor, x2: torch.Tensor, *, x1_scale: torch.Tensor | None = None, x2_scale: torch.Tensor | None = None
) -> torch.Tensor:
    """[m, n] bfloat16. x1: [b, m, k] and x2: [b, k, n], int8; x1_scale: [b, m] float32; x2_scale: [n] bfloat16."""
    if x1_scale is None or x2_scale is None:
        raise ValueError(f"{_NAME}: x1_scale [b, m] and x2_scale [n] are needed; one of them is None.")
    if x1.dtype != torch.int8 or x2.dtype != torch.int8:
        raise unsupported(_NAME, "x1 and x2", (x1.dtype, x2.dtype), "int8 tensors")
    wide = compute_dtype(x1_scale, x2_scale)
    parts = product(x1, x2).to(wide) * x2_scale.to(wide) * x1_scale.to(wide).unsqueeze(-1)
    out = parts.sum(0)
    return out if wide == torch.float64 else out.to(torch.bfloat16)
