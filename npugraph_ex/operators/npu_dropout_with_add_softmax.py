"""Scaled sum, softmax and dropout in one operator, and its gradient.

Formula (operator documentation of ``torch_npu.npu_dropout_with_add_softmax``; op-plugin's kernel)::

    softmax  = softmax(x1 + alpha * input)          over dim
    dropout  = softmax / (1 - prob) where the mask is 1, else 0

    gradient of input = alpha * softmax * (g - sum(g * softmax))        g = grad / (1 - prob) where the mask is 1, else 0

The device seeds this mask with a constant, so no generator moves on. As gradient of ``x1`` it hands out ``grad`` itself. The mask
has a byte for each element, rounded up to 128.
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._dropout import drawn
from npugraph_ex.operators._precision import compute_dtype, stored_like
from npugraph_ex.operators._record import Operator, call

_SEED, _ALIGNED = 2, 128
_DTYPES = (torch.float16, torch.float32)


def _kept(x: torch.Tensor, mask: torch.Tensor, prob: float) -> torch.Tensor:
    """``x / (1 - prob)`` where the mask of bytes is 1, else 0."""
    chosen = mask[: x.numel()].reshape(x.shape).bool()
    return torch.where(chosen, x / (1 - prob) if prob < 1.0 else 0.0, 0.0)


@Operator(
    name="npu::npu_dropout_with_add_softmax",
    source="operator documentation of torch_npu.npu_dropout_with_add_softmax",
    dtypes=_DTYPES,
    examples=(lambda: call(torch.randn(8, 16).half(), torch.randn(8, 16).half(), 0.5, 0.3, -1),),
)
def npu_dropout_with_add_softmax(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    x1: torch.Tensor,
    alpha: float,
    prob: float,
    dim: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(mask, softmax, dropout)``: mask uint8, a byte for each element; softmax like ``x1``, dropout like ``input``."""
    dtype = compute_dtype(input, x1)
    softmax = torch.softmax(x1.to(dtype) + alpha * input.to(dtype), dim=dim)
    kept = drawn((x1.numel(),), prob, generator=torch.Generator().manual_seed(_SEED)).to(torch.uint8).to(x1.device)
    mask = torch.nn.functional.pad(kept, (0, -x1.numel() % _ALIGNED))
    return mask, softmax.to(x1.dtype).contiguous(), _kept(softmax, mask, prob).to(input.dtype).contiguous()


@Operator(
    name="npu::npu_dropout_with_add_softmax_backward",
    source="op-plugin, aclops/DropoutWithAddSoftmaxKernelNpu.cpp",
    dtypes=_DTYPES,
    examples=(
        lambda: call(
            torch.randn(8, 16).half(),
            torch.randint(2, (128,), dtype=torch.uint8),
            torch.rand(8, 16).half(),
            0.5,
            0.3,
            -1,
        ),
    ),
)
def npu_dropout_with_add_softmax_backward(
    grad: torch.Tensor,
    mask: torch.Tensor,
    softmax_out: torch.Tensor,
    alpha: float,
    prob: float,
    dim: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of input and x1, like ``softmax_out`` and ``grad``; the second is ``grad`` copied."""
    dtype = compute_dtype(grad, softmax_out)
    softmax, g = softmax_out.to(dtype), _kept(grad.to(dtype), mask, prob)
    to_input = alpha * softmax * (g - (g * softmax).sum(dim, keepdim=True))
    return stored_like(softmax_out, to_input, softmax_out.dtype), torch.empty_like(grad).copy_(grad)
