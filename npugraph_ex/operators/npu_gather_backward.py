"""The gradient of ``torch.gather``: each element of the gradient added where it was taken from (op-plugin; torch's derivative)."""

from __future__ import annotations

import torch

from npugraph_ex.operators._precision import compute_dtype, unsupported
from npugraph_ex.operators._record import Operator, call


@Operator(
    name="npu::npu_gather_backward",
    source="op-plugin, opapi/GatherKernelNpuOpApi.cpp; torch's derivative of gather",
    dtypes=(torch.float16, torch.bfloat16, torch.float32),
    examples=(lambda: call(torch.randn(2, 4).half(), [2, 3], 1, torch.randint(3, (2, 4)), False),),
)
def npu_gather_backward(
    grad: torch.Tensor, self_size: list[int], dim: int, index: torch.Tensor, sparse_grad: bool
) -> torch.Tensor:
    """Of shape ``self_size`` in grad's dtype, summed in float32."""
    if sparse_grad:
        raise unsupported("npu_gather_backward", "sparse_grad", sparse_grad, "False")
    wide = grad.to(compute_dtype(grad))
    return wide.new_zeros(self_size).scatter_add(dim, index, wide).to(grad.dtype)
