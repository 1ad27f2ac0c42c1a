"""RMS normalisation, with and without the residual sum before it.

Formula (CANN operator documentation, aclnnRmsNorm and aclnnAddRmsNorm)::

    x    = x1 + x2                                  (aclnnAddRmsNorm only)
    rstd = 1 / sqrt(mean(x_i^2) + epsilon)          mean over the dimensions that gamma has
    y    = x * rstd * gamma

The sum is rounded to the dtype of ``x1`` *before* it is normalised: that is the tensor which the operator hands
out as its residual, and the published AscendC kernels (ops-nn, norm/add_rms_norm) normalise exactly it. So
``npu_add_rms_norm(a, b, g)`` equals ``npu_rms_norm(a + b, g)`` to the bit.
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._precision import compute_dtype, stored_like


def normalise(
    x: torch.Tensor, gamma: torch.Tensor, epsilon: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(y, rstd)`` of ``x`` in ``dtype``, nothing rounded.

    ``gamma`` has the trailing dimensions of ``x``; ``rstd`` has the shape of ``x`` with those dimensions 1.
    """
    rank = gamma.dim()
    if rank == 0 or tuple(x.shape[-rank:]) != tuple(gamma.shape):
        raise ValueError(
            f"gamma must have the trailing dimensions of x, which has shape {tuple(x.shape)}; "
            f"it has shape {tuple(gamma.shape)}."
        )
    wide = x.to(dtype)
    mean = wide.square().mean(dim=tuple(range(-rank, 0)), keepdim=True)
    rstd = torch.rsqrt(mean + epsilon)
    return wide * rstd * gamma.to(dtype), rstd


def npu_rms_norm(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    gamma: torch.Tensor,
    epsilon: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(y, rstd)``: y like ``input``; rstd float32 (float64 for float64), 1 in the normalised dimensions."""
    dtype = compute_dtype(input, gamma)
    y, rstd = normalise(input, gamma, epsilon, dtype)
    return stored_like(input, y, input.dtype), rstd.contiguous()


def npu_add_rms_norm(
    x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(y, rstd, x)``: y and x like ``x1``, where x = x1 + x2; rstd as in ``npu_rms_norm``."""
    dtype = compute_dtype(x1, x2, gamma)
    x = stored_like(x1, x1.to(dtype) + x2.to(dtype), x1.dtype)
    y, rstd = normalise(x, gamma, epsilon, dtype)
    return stored_like(x1, y, x1.dtype), rstd.contiguous(), x
