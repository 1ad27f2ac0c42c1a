"""Manifold-constrained hyper-connections after a layer: its output spread over the streams of the residual, and gradients.

Formula (operator documentation of ``torch_npu.npu_mhc_post``; the tests of op-plugin tell which index of ``h_res`` is summed), for
each token with its n streams x [n, D]::

    y[j] = sum over i of h_res[i, j] * x[i]  +  h_post[j] * h_out           without h_res: x[j] + ...
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._alike import Alike
from npugraph_ex.operators._gradients import gradients
from npugraph_ex.operators._precision import HALVES, RefusedArgumentError, compute_dtype
from npugraph_ex.operators._record import Operator, call

_SOURCE = "operator documentation of torch_npu.npu_mhc_post; op-plugin"
_BACKWARD = "npu_mhc_post_backward"


def _spread(x: torch.Tensor, h_res: torch.Tensor | None, h_out: torch.Tensor, h_post: torch.Tensor) -> torch.Tensor:
    """The formula on operands of one dtype."""
    return (x if h_res is None else h_res.mT @ x) + h_post.unsqueeze(-1) * h_out.unsqueeze(-2)


def _inputs() -> tuple[torch.Tensor, ...]:
    return torch.randn(3, 4, 16).half(), torch.rand(3, 4, 4), torch.randn(3, 16).half(), torch.rand(3, 4)


@Operator(
    name="npu::npu_mhc_post",
    source=_SOURCE,
    dtypes=(torch.float16, torch.bfloat16),
    alike=Alike(dtype=("x", "h_out")),
    examples=(lambda: call(*_inputs()),),
)
def npu_mhc_post(
    x: torch.Tensor, h_res: torch.Tensor | None, h_out: torch.Tensor, h_post: torch.Tensor
) -> torch.Tensor:
    """Like ``x`` [..., n, D], contiguous; h_res [..., n, n], h_out [..., D], h_post [..., n]; one or two leading dimensions."""
    dtype = compute_dtype(x, h_res, h_out, h_post)
    wide = (None if value is None else value.to(dtype) for value in (x, h_res, h_out, h_post))
    return _spread(*wide).to(x.dtype).contiguous()  # type: ignore[arg-type]


def _refuse(
    grad_y: torch.Tensor, x: torch.Tensor, h_res: torch.Tensor | None, h_out: torch.Tensor, h_post: torch.Tensor
) -> None:
    """Dtypes and shapes as the device wants them; float64 stands for each of them in a reference run."""
    if x.dtype not in {*HALVES, torch.float64}:
        raise RefusedArgumentError(f"{_BACKWARD}: x dtype must be FLOAT16 or BFLOAT16; it is {x.dtype}.")
    if x.dim() not in {3, 4}:
        raise RefusedArgumentError(f"{_BACKWARD}: x dim must be 3 or 4; it is {x.dim()}.")
    if grad_y.shape != x.shape:
        raise RefusedArgumentError(
            f"{_BACKWARD}: grad_y shape must be the same as x shape, {tuple(x.shape)}; it is {tuple(grad_y.shape)}."
        )
    square = (*x.shape[:-1], x.shape[-2])
    if h_res is not None and h_res.shape != square:
        raise RefusedArgumentError(f"{_BACKWARD}: h_res shape must be {square}; it is {tuple(h_res.shape)}.")
    for name, value, like in (("grad_y", grad_y, x.dtype), ("h_out", h_out, x.dtype)):
        if value.dtype != like:
            raise RefusedArgumentError(f"{_BACKWARD}: {name} dtype must be {like}, that of x; it is {value.dtype}.")
    for name, scale in (("h_post", h_post), ("h_res", h_res)):
        if scale is not None and scale.dtype not in {torch.float32, torch.float64}:
            raise RefusedArgumentError(f"{_BACKWARD}: {name} dtype must be FLOAT32; it is {scale.dtype}.")


@Operator(
    name="npu::npu_mhc_post_backward",
    source=_SOURCE,
    constraints=_refuse,
    dtypes=(torch.float16, torch.bfloat16),
    examples=(lambda: call(torch.randn(3, 4, 16).half(), *_inputs()),),
)
def npu_mhc_post_backward(
    grad_y: torch.Tensor, x: torch.Tensor, h_res: torch.Tensor | None, h_out: torch.Tensor, h_post: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Gradients of x, h_res, h_out and h_post, in their dtypes; 0 for an ``h_res`` that is left out."""
    to_x, to_res, to_out, to_post = gradients(_spread, (x, h_res, h_out, h_post), (grad_y,))
    if to_res is None:
        to_res = to_x.new_zeros(*x.shape[:-1], x.shape[-2])
    return (
        to_x.to(x.dtype).contiguous(),
        to_res.contiguous(),
        to_out.to(h_out.dtype).contiguous(),
        to_post.to(h_post.dtype).contiguous(),
    )
