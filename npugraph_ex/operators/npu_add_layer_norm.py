"""Residual sum and layer normalisation in one operator, and its gradients.

Formula (CANN operator documentation, aclnnAddLayerNorm and aclnnAddLayerNormGrad)::

    x    = x1 + x2
    rstd = 1 / sqrt(var(x) + epsilon)               mean and variance over the dimensions that gamma has
    y    = (x - mean(x)) * rstd * gamma + beta

    dx1 = dx2 = the gradient of x, and dsum added
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._alike import Alike
from npugraph_ex.operators._layer_norm import gradients, normalise
from npugraph_ex.operators._precision import FLOATS, compute_dtype, refused, stored_like
from npugraph_ex.operators._record import Call, Operator, call


def _example(**kwargs: bool) -> Call:
    return call(*(torch.randn(3, 16).half() for _ in range(2)), *(torch.randn(16).half() for _ in range(2)), **kwargs)


def _refuse_mixed(
    x1: torch.Tensor,
    x2: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor,
    epsilon: float = 1e-5,
    additional_output: bool = False,
) -> None:
    """The documented groups: a float32 term beside one in half precision; vectors in float32, or in the dtype of both terms."""
    if x1.dtype != x2.dtype and torch.float32 not in {x1.dtype, x2.dtype}:
        raise refused("npu_add_layer_norm", "x2", x2.dtype, f"of the dtype of x1, {x1.dtype}, or torch.float32")
    taken = {torch.float32, x1.dtype} if x1.dtype == x2.dtype else {torch.float32}
    if gamma.dtype not in taken or beta.dtype != gamma.dtype:
        expected = " or ".join(sorted(map(str, taken)))
        raise refused(
            "npu_add_layer_norm", "gamma and beta", f"{gamma.dtype} and {beta.dtype}", f"{expected}, both alike"
        )


@Operator(
    name="npu::npu_add_layer_norm",
    dtypes=FLOATS,
    floats_only=True,
    source="CANN operator documentation, aclnnAddLayerNorm; ops-nn, norm/add_layer_norm",
    alike=Alike(shape=("x1", "x2")),
    constraints=_refuse_mixed,
    examples=(_example, lambda: _example(additional_output=True)),
)
def npu_add_layer_norm(
    x1: torch.Tensor,
    x2: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor,
    epsilon: float = 1e-5,
    additional_output: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(y, mean, rstd, x)``: y and x like ``x1``, float32 where x2 has another dtype; the others float32, 1 where normalised.

    Without ``additional_output`` the device leaves x unwritten, and it is zeros here. x2 has the shape of x1.
    """
    dtype = compute_dtype(x1, x2, gamma, beta)
    total = x1.to(dtype) + x2.to(dtype)
    y, mean, rstd = normalise(total, gamma, beta, epsilon)
    target = x1.dtype if x1.dtype == x2.dtype else dtype
    x = stored_like(x1, total, target) if additional_output else torch.zeros_like(x1, dtype=target)
    return stored_like(x1, y, target), mean.contiguous(), rstd.contiguous(), x


def _gradient_example() -> Call:
    args = _example().args
    _, mean, rstd, _ = npu_add_layer_norm(*args)
    return call(torch.randn(3, 16).half(), args[0], args[1], rstd, mean, args[2], None)


@Operator(
    name="npu::npu_add_layer_norm_backward",
    dtypes=FLOATS,
    floats_only=True,
    source="CANN operator documentation, aclnnAddLayerNormGrad",
    alike=Alike(shape=("x1", "dy_opt", "x2", "dsum_opt"), dtype=("x1", "dy_opt", "x2", "gamma", "dsum_opt")),
    examples=(_gradient_example,),
)
def npu_add_layer_norm_backward(
    dy_opt: torch.Tensor | None,
    x1: torch.Tensor,
    x2: torch.Tensor,
    rstd: torch.Tensor,
    mean: torch.Tensor,
    gamma: torch.Tensor,
    dsum_opt: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(dx1, dx2, dgamma, dbeta)``: the first two like ``x1``, and equal; the others float32 of the shape of ``gamma``."""
    dtype = compute_dtype(dy_opt, x1, x2, gamma)
    total = x1.to(dtype) + x2.to(dtype)
    dy = torch.zeros_like(total) if dy_opt is None else dy_opt.to(dtype)
    dx, dgamma, dbeta = gradients(dy, total, gamma, mean, rstd)
    if dsum_opt is not None:
        dx = dx + dsum_opt.to(dtype)
    return stored_like(x1, dx, x1.dtype), stored_like(x1, dx, x1.dtype), dgamma.contiguous(), dbeta.contiguous()
