"""RMS normalisation.

Formula (CANN operator documentation, aclnnRmsNorm)::

    rstd = 1 / sqrt(mean(x_i^2) + epsilon)          mean over the dimensions that gamma has
    y    = x * rstd * gamma
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._alike import Alike
from npugraph_ex.operators._precision import compute_dtype, stored_like
from npugraph_ex.operators._record import Operator, call


def normalise(
    x: torch.Tensor, gamma: torch.Tensor, epsilon: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(y, rstd)`` of ``x`` in ``dtype``, nothing rounded.

    ``gamma`` has the trailing dimensions of ``x``; ``rstd`` has the shape of ``x`` with those dimensions 1.
    """
    rank = gamma.dim()
    if rank == 0 or tuple(x.shape[-rank:]) != tuple(gamma.shape):
        one = f"; for one factor write `gamma.expand({x.shape[-1]}).contiguous()`" if gamma.numel() == 1 else ""
        raise ValueError(
            f"gamma must have the trailing dimensions of x, which has shape {tuple(x.shape)}; "
            f"it has shape {tuple(gamma.shape)}{one}."
        )
    wide = x.to(dtype)
    mean = wide.square().mean(dim=tuple(range(-rank, 0)), keepdim=True)
    rstd = torch.rsqrt(mean.double() + epsilon).to(dtype)  # a row of zeros gives 1000 for 1e-6, as on the device
    return wide * rstd * gamma.to(dtype), rstd


@Operator(
    name="npu::npu_rms_norm",
    source="CANN operator documentation, aclnnRmsNorm",
    dtypes=(torch.float16, torch.bfloat16, torch.float32),
    floats_only=True,
    explain_unfused=True,
    alike=Alike(dtype=("input", "gamma"), besides={"gamma": (torch.float32,)}),
    examples=(lambda: call(torch.randn(3, 16).half(), torch.randn(16).half()),),
)
def npu_rms_norm(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    gamma: torch.Tensor,
    epsilon: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(y, rstd)``: y like ``input``; rstd float32 (float64 for float64), 1 in the normalised dimensions."""
    dtype = compute_dtype(input, gamma)
    y, rstd = normalise(input, gamma, epsilon, dtype)
    return stored_like(input, y, input.dtype), rstd.contiguous()
