"""The gradients of RMS normalisation.

Formula (CANN operator documentation, aclnnRmsNormGrad), with n the normalised elements of a row::

    x^     = x * rstd
    dx     = (dy * gamma - x^ * mean(dy * gamma * x^)) * rstd       mean over the dimensions that gamma has
    dgamma = sum(dy * x^)                                           over the other dimensions
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._precision import compute_dtype, stored_like
from npugraph_ex.operators._record import Operator, call


@Operator(
    name="npu::npu_rms_norm_backward",
    source="CANN operator documentation, aclnnRmsNormGrad",
    examples=(
        lambda: call(
            torch.randn(3, 16).half(), torch.randn(3, 16).half(), torch.randn(16).half(), torch.rand(3, 1) + 0.5
        ),
    ),
)
def npu_rms_norm_backward(
    dy: torch.Tensor,
    input: torch.Tensor,  # noqa: A002 - the schema's name
    gamma: torch.Tensor,
    rstd: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(dx, dgamma)``: dx like ``input``; dgamma in the shape of ``gamma``, float32 (float64 for float64)."""
    dtype = compute_dtype(dy, input, gamma)
    rank = gamma.dim()
    normal = input.to(dtype) * rstd.to(dtype)
    wide = dy.to(dtype)
    scaled = wide * gamma.to(dtype)
    mean = (scaled * normal).mean(dim=tuple(range(-rank, 0)), keepdim=True)
    dx = (scaled - normal * mean) * rstd.to(dtype)
    dgamma = wide * normal
    for _ in range(input.dim() - rank):
        dgamma = dgamma.sum(0)
    return stored_like(input, dx, input.dtype), dgamma
