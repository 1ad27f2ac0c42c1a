"""Residual sum and RMS normalisation in one operator.

Formula (CANN operator documentation, aclnnAddRmsNorm)::

    x    = x1 + x2
    rstd = 1 / sqrt(mean(x_i^2) + epsilon)          mean over the dimensions that gamma has
    y    = x * rstd * gamma

The sum is rounded to the dtype of ``x1`` *before* it is normalised: that is the tensor which the operator hands
out as its residual, and the published AscendC kernels (ops-nn, norm/add_rms_norm) normalise exactly it. So
``npu_add_rms_norm(a, b, g)`` equals ``npu_rms_norm(a + b, g)`` to the bit.
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._alike import Alike
from npugraph_ex.operators._precision import compute_dtype, stored_like
from npugraph_ex.operators._record import Operator, call
from npugraph_ex.operators.npu_rms_norm import normalise


@Operator(
    name="npu::npu_add_rms_norm",
    source="CANN operator documentation, aclnnAddRmsNorm; ops-nn, norm/add_rms_norm",
    dtypes=(torch.float16, torch.bfloat16, torch.float32),
    floats_only=True,
    explain_unfused=True,
    alike=Alike(shape=("x1", "x2"), dtype=("x1", "x2", "gamma")),
    examples=(lambda: call(torch.randn(3, 16).half(), torch.randn(3, 16).half(), torch.randn(16).half()),),
)
def npu_add_rms_norm(
    x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(y, rstd, x)``: y and x like ``x1``, where x = x1 + x2; rstd as in ``npu_rms_norm``."""
    dtype = compute_dtype(x1, x2, gamma)
    x = stored_like(x1, x1.to(dtype) + x2.to(dtype), x1.dtype)
    y, rstd = normalise(x, gamma, epsilon, dtype)
    return stored_like(x1, y, x1.dtype), rstd.contiguous(), x
