"""Residual sum and RMS normalisation, handed out in the input's dtype and as float32.

Formula (CANN operator documentation, aclnnAddRmsNormCast)::

    x    = x1 + x2
    rstd = 1 / sqrt(mean(x_i^2) + epsilon)          mean over the dimensions that gamma has
    y2   = x * rstd * gamma                         rounded to the dtype of x1
    y1   = float(y2)

So y1 carries no more digits than y2: a cast that follows ``npu_add_rms_norm`` can be replaced. What is normalised is,
in the published AscendC kernels (ops-nn, norm/add_rms_norm_cast), the rounded sum for float16 and the unrounded one for
bfloat16; ``npu_add_rms_norm`` normalises the rounded sum in both, so in bfloat16 the two may differ in the last digit.
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._alike import Alike
from npugraph_ex.operators._precision import compute_dtype, stored_like
from npugraph_ex.operators._record import Operator, call
from npugraph_ex.operators.npu_rms_norm import normalise


@Operator(
    name="npu::npu_add_rms_norm_cast",
    source="CANN operator documentation, aclnnAddRmsNormCast; ops-nn, norm/add_rms_norm_cast",
    dtypes=(torch.float16, torch.bfloat16),
    floats_only=True,
    alike=Alike(shape=("x1", "x2"), dtype=("x1", "x2", "gamma")),
    examples=(lambda: call(torch.randn(3, 16).half(), torch.randn(3, 16).half(), torch.randn(16).half()),),
)
def npu_add_rms_norm_cast(
    x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(y1, y2, rstd, x)``: y1 float32 (float64 for float64), y2 and x like ``x1``; rstd as in ``npu_rms_norm``."""
    dtype = compute_dtype(x1, x2, gamma)
    total = x1.to(dtype) + x2.to(dtype)
    x = stored_like(x1, total, x1.dtype)
    y, rstd = normalise(total if x1.dtype == torch.bfloat16 else x, gamma, epsilon, dtype)
    y2 = stored_like(x1, y, x1.dtype)
    return stored_like(x1, y2, dtype), y2, rstd.contiguous(), x
