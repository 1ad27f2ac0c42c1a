"""Layer normalisation of a scaled residual sum, and its gradients.

Formula (CANN operator documentation, aclnnDeepNorm and aclnnDeepNormGrad)::

    x'   = alpha * x + gx
    rstd = 1 / sqrt(var(x') + epsilon)              mean and variance over the dimensions that gamma has
    y    = (x' - mean(x')) * rstd * gamma + beta

    dgx = the gradient of x',  dx = alpha * dgx
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._alike import Alike
from npugraph_ex.operators._layer_norm import gradients, normalise
from npugraph_ex.operators._precision import FLOATS, compute_dtype, stored_like
from npugraph_ex.operators._record import Call, Operator, call


def _example() -> Call:
    x, gx = torch.randn(3, 16).half(), torch.randn(3, 16).half()
    return call(x, gx, torch.randn(16).half(), torch.randn(16).half())


@Operator(
    name="npu::npu_deep_norm",
    dtypes=FLOATS,
    floats_only=True,
    source="CANN operator documentation, aclnnDeepNorm",
    alike=Alike(shape=("x", "gx"), dtype=("x", "gx", "beta", "gamma")),
    examples=(
        _example,
        lambda: call(*(torch.randn(2, 3, 8) for _ in range(2)), *(torch.randn(3, 8) for _ in range(2))),
    ),
)
def npu_deep_norm(
    x: torch.Tensor,
    gx: torch.Tensor,
    beta: torch.Tensor,
    gamma: torch.Tensor,
    alpha: float = 0.3,
    epsilon: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(mean, rstd, y)``: y like ``x``; the others float32 (float64 for float64), 1 in the normalised dimensions."""
    dtype = compute_dtype(x, gx, gamma, beta)
    y, mean, rstd = normalise(alpha * x.to(dtype) + gx.to(dtype), gamma, beta, epsilon)
    return mean.contiguous(), rstd.contiguous(), stored_like(x, y, x.dtype)


def _gradient_example() -> Call:
    args = _example().args
    mean, rstd, _ = npu_deep_norm(*args)
    return call(torch.randn(3, 16).half(), args[0], args[1], args[3], mean, rstd)


@Operator(
    name="npu::npu_deep_norm_backward",
    dtypes=FLOATS,
    floats_only=True,
    source="CANN operator documentation, aclnnDeepNormGrad",
    alike=Alike(shape=("x", "dy", "gx"), dtype=("x", "dy", "gx", "gamma")),
    examples=(_gradient_example,),
)
def npu_deep_norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    gx: torch.Tensor,
    gamma: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    alpha: float = 0.3,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(dx, dgx, dbeta, dgamma)``: each like the tensor whose gradient it is."""
    dtype = compute_dtype(dy, x, gx, gamma)
    total = alpha * x.to(dtype) + gx.to(dtype)
    dgx, dgamma, dbeta = gradients(dy.to(dtype), total, gamma, mean, rstd)
    return (
        stored_like(x, alpha * dgx, x.dtype),
        stored_like(gx, dgx, gx.dtype),
        stored_like(gamma, dbeta, gamma.dtype),
        stored_like(gamma, dgamma, gamma.dtype),
    )
