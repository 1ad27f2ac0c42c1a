"""Manifold-constrained hyper-connections after a layer: its output spread over the streams of the residual, and gradients.

Formula (operator documentation of ``torch_npu.npu_mhc_post``; the tests of op-plugin tell which index of ``h_res`` is summed), for
each token with its n streams x [n, D]::

    y[j] = sum over i of h_res[i, j] * x[i]  +  h_post[j] * h_out           without h_res: x[j] + ...
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._gradients import gradients
from npugraph_ex.operators._precision import compute_dtype
from npugraph_ex.operators._record import Operator, call

_SOURCE = "operator documentation of torch_npu.npu_mhc_post; op-plugin"


def _spread(x: torch.Tensor, h_res: torch.Tensor | None, h_out: torch.Tensor, h_post: torch.Tensor) -> torch.Tensor:
    """The formula on operands of one dtype."""
    return (x if h_res is None else h_res.mT @ x) + h_post.unsqueeze(-1) * h_out.unsqueeze(-2)


def _inputs() -> tuple[torch.Tensor, ...]:
    return torch.randn(3, 4, 16).half(), torch.rand(3, 4, 4), torch.randn(3, 16).half(), torch.rand(3, 4)


@Operator(
    name="npu::npu_mhc_post",
    source=_SOURCE,
    dtypes=(torch.float16, torch.bfloat16),
    examples=(lambda: call(*_inputs()),),
)
def npu_mhc_post(
    x: torch.Tensor, h_res: torch.Tensor | None, h_out: torch.Tensor, h_post: torch.Tensor
) -> torch.Tensor:
    """Like ``x`` [..., n, D], contiguous; h_res [..., n, n], h_out [..., D], h_post [..., n]; one or two leading dimensions."""
    dtype = compute_dtype(x, h_res, h_out, h_post)
    wide = (None if value is None else value.to(dtype) for value in (x, h_res, h_out, h_post))
    return _spread(*wide).to(x.dtype).contiguous()  # type: ignore[arg-type]


@Operator(
    name="npu::npu_mhc_post_backward",
    source=_SOURCE,
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
