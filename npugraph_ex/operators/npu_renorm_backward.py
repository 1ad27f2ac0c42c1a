"""The gradient of ``torch.renorm``.

Formula: the derivative of ``x * maxnorm / (norm + 1e-7)`` for the slices of ``dim`` whose p-norm is above ``maxnorm``; the others
are as they were (documentation of ``torch.renorm``).
"""

from __future__ import annotations

import math

import torch

from npugraph_ex.operators._precision import compute_dtype, refused
from npugraph_ex.operators._record import Operator, call


def _norm_slope(given: torch.Tensor, norm: torch.Tensor, p: float, dims: list[int]) -> torch.Tensor:
    """The derivative of the p-norm over ``dims`` by the elements that it is taken of."""
    if p == math.inf:
        largest = given.abs() == norm
        return given.sgn() * largest / largest.sum(dims, keepdim=True)
    return given.sgn() * torch.pow(given.abs() / norm, p - 1)


@Operator(
    name="npu::npu_renorm_backward",
    source="documentation of torch.renorm; op-plugin, opapi/RenormBackwardKernelNpu.cpp",
    dtypes=(torch.float16, torch.bfloat16, torch.float32),
    examples=(lambda: call(torch.randn(3, 4, 2).half(), torch.randn(3, 4, 2).half(), 2.0, 0, 2.5),),
)
def npu_renorm_backward(
    grad: torch.Tensor,
    input: torch.Tensor,  # noqa: A002 - the schema's name
    p: float,
    dim: int,
    maxnorm: float,
) -> torch.Tensor:
    """Contiguous, in ``grad``'s dtype; complex inputs, too."""
    dtype = input.dtype if input.is_complex() else compute_dtype(grad, input)
    wide, given = grad.to(dtype), input.to(dtype)
    if not -input.dim() <= dim < input.dim():
        raise refused("npu_renorm_backward", "dim", dim, f"a dimension of input, which has {input.dim()}")
    others = [other for other in range(input.dim()) if other != dim % input.dim()]
    norm = torch.linalg.vector_norm(given, p, others, keepdim=True)
    along = (given.conj() * wide).real.sum(others, keepdim=True)
    safe = norm + 1e-7
    scaled = maxnorm / safe * (wide - _norm_slope(given, norm, p, others) * along / safe)
    return torch.where(norm > maxnorm, scaled, wide).to(grad.dtype).contiguous()
