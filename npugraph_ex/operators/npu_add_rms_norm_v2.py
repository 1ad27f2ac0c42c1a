"""Residual sum and RMS normalisation, written over the operands; and the same on copies.

Formula (CANN operator documentation, aclnnInplaceAddRmsNorm)::

    x    = x1 + x2
    rstd = 1 / sqrt(mean(x_i^2) + epsilon)          mean over the dimensions that gamma has
    x1   = x * rstd * gamma
    x2   = x
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._alike import Alike
from npugraph_ex.operators._precision import FLOATS
from npugraph_ex.operators._record import Call, Operator, call
from npugraph_ex.operators.npu_add_rms_norm import npu_add_rms_norm


def _example() -> Call:
    return call(torch.randn(3, 16).half(), torch.randn(3, 16).half(), torch.randn(16).half())


@Operator(
    name="npu::npu_add_rms_norm_v2",
    dtypes=FLOATS,
    floats_only=True,
    source="CANN operator documentation, aclnnInplaceAddRmsNorm",
    alike=Alike(shape=("x1", "x2"), dtype=("x1", "x2", "gamma")),
    examples=(_example,),
)
def npu_add_rms_norm_v2(x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6) -> torch.Tensor:
    """``rstd`` as in ``npu_rms_norm``; x1 is overwritten by the norm, x2 by the sum."""
    y, rstd, x = npu_add_rms_norm(x1, x2, gamma, epsilon)
    x1.copy_(y)
    x2.copy_(x)
    return rstd


@Operator(
    name="npu::npu_add_rms_norm_v2_functional",
    dtypes=FLOATS,
    floats_only=True,
    source="CANN operator documentation, aclnnInplaceAddRmsNorm",
    alike=Alike(shape=("x1", "x2"), dtype=("x1", "x2", "gamma")),
    examples=(_example,),
)
def npu_add_rms_norm_v2_functional(
    x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(rstd, y, x)``: y like ``x1``, x like ``x2``."""
    y, rstd, x = npu_add_rms_norm(x1, x2, gamma, epsilon)
    return rstd, y, torch.empty_like(x2).copy_(x)
