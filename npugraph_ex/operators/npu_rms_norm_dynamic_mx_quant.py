"""RMS normalisation, after a residual sum too, and quantisation to an MX format in one operator.

Formula (CANN operator documentation, aclnnRmsNormDynamicMxQuant and aclnnAddRmsNormDynamicMxQuant)::

    x        = x1 + x2
    rstd     = 1 / sqrt(mean(x_i^2) + epsilon)      mean over the dimensions that gamma has
    n        = x * rstd * gamma + beta
    y, scale = n quantised as by npu_dynamic_mx_quant, in blocks of 32 along the last dimension

The sum is rounded in the output only.
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._alike import Alike
from npugraph_ex.operators._microscaling import block_quantisation, quantised
from npugraph_ex.operators._precision import HALVES, compute_dtype
from npugraph_ex.operators._record import Operator, call
from npugraph_ex.operators.npu_rms_norm import normalise

_NORM, _ADD = "npu_rms_norm_dynamic_mx_quant", "npu_add_rms_norm_dynamic_mx_quant"


def _normalised(
    x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor | None, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(n, rstd)`` in the dtype of ``x``."""
    n, rstd = normalise(x, gamma, epsilon, x.dtype)
    return (n if beta is None else n + beta.to(x.dtype)), rstd.contiguous()


@Operator(
    name="npu::npu_rms_norm_dynamic_mx_quant",
    source="CANN operator documentation, aclnnRmsNormDynamicMxQuant",
    absent_on=("A2", "A3"),
    dtypes=HALVES,
    alike=Alike(
        shape=("gamma", "beta"),
        dtype=("x", "gamma", "beta"),
        besides={"gamma": (torch.float32,), "beta": (torch.float32,)},
    ),
    examples=(
        lambda: call(torch.randn(3, 80).half(), torch.randn(80).half(), beta=torch.randn(80).half(), dst_type=24),
    ),
)
def npu_rms_norm_dynamic_mx_quant(
    x: torch.Tensor,
    gamma: torch.Tensor,
    *,
    beta: torch.Tensor | None = None,
    epsilon: float = 1e-6,
    scale_alg: int = 0,
    round_mode: str = "rint",
    dst_type: int = 296,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(y, scale, rstd)``: y and scale as in ``npu_dynamic_mx_quant``; rstd as in ``npu_rms_norm``."""
    how = block_quantisation(_NORM, dst_type, scale_alg=scale_alg, round_mode=round_mode)
    n, rstd = _normalised(x.to(compute_dtype(x, gamma, beta)), gamma, beta, epsilon)
    return (*quantised(x, n, -1, how, _NORM), rstd)


@Operator(
    name="npu::npu_add_rms_norm_dynamic_mx_quant",
    source="CANN operator documentation, aclnnAddRmsNormDynamicMxQuant",
    absent_on=("A2", "A3"),
    dtypes=HALVES,
    alike=Alike(
        shape=("x1", "x2"),
        dtype=("x1", "x2", "gamma", "beta"),
        besides={"gamma": (torch.float32,), "beta": (torch.float32,)},
    ),
    examples=(lambda: call(torch.randn(3, 80).half(), torch.randn(3, 80).half(), torch.randn(80).half(), dst_type=24),),
)
def npu_add_rms_norm_dynamic_mx_quant(
    x1: torch.Tensor,
    x2: torch.Tensor,
    gamma: torch.Tensor,
    *,
    beta: torch.Tensor | None = None,
    epsilon: float = 1e-6,
    scale_alg: int = 0,
    round_mode: str = "rint",
    dst_type: int = 296,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(y, x, scale, rstd)``: y and scale as in ``npu_dynamic_mx_quant``; x, the sum, like ``x1``; rstd as in ``npu_rms_norm``."""
    how = block_quantisation(_ADD, dst_type, scale_alg=scale_alg, round_mode=round_mode)
    dtype = compute_dtype(x1, x2, gamma, beta)
    total = x1.to(dtype) + x2.to(dtype)
    n, rstd = _normalised(total, gamma, beta, epsilon)
    y, scale = quantised(x1, n, -1, how, _ADD)
    return y, torch.empty_like(x1).copy_(total), scale, rstd
