"""Softmax of scaled and masked scores, and its gradient.

Formula (operator documentation of ``torch_npu.npu_scaled_masked_softmax``; CANN's aclnnScaledMaskedSoftmaxBackward)::

    y        = softmax(x * scale, with -10000 where the mask is true)           over the last dimension
    gradient = (y_grad - sum(y_grad * y)) * y * scale, and 0 where the mask is true

With ``fixed_triu_mask`` the mask is what lies above the diagonal, whatever ``mask`` holds.
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._alike import Alike
from npugraph_ex.operators._precision import FLOATS, compute_dtype, stored_like
from npugraph_ex.operators._record import Operator, call

_MASKED = -10000.0


def _left_out(x: torch.Tensor, mask: torch.Tensor, *, upper: bool) -> torch.Tensor:
    """What is masked, so that it broadcasts to ``x``."""
    if upper:
        return torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
    return mask.bool()


@Operator(
    name="npu::npu_scaled_masked_softmax",
    source="operator documentation of torch_npu.npu_scaled_masked_softmax",
    dtypes=FLOATS,
    floats_only=True,
    examples=(
        lambda: call(torch.randn(2, 3, 4, 8).half(), torch.rand(2, 1, 4, 8) > 0.5, 0.5),
        lambda: call(torch.randn(2, 3, 8, 8), torch.zeros(2, 3, 8, 8, dtype=torch.bool), fixed_triu_mask=True),
    ),
)
def npu_scaled_masked_softmax(
    x: torch.Tensor, mask: torch.Tensor, scale: float = 1, fixed_triu_mask: bool = False
) -> torch.Tensor:
    """Like ``x``; the boolean mask broadcasts to it."""
    scores = (x.to(compute_dtype(x)) * scale).masked_fill(_left_out(x, mask, upper=fixed_triu_mask), _MASKED)
    return stored_like(x, torch.softmax(scores, dim=-1), x.dtype)


@Operator(
    name="npu::npu_scaled_masked_softmax_backward",
    source="CANN operator documentation, aclnnScaledMaskedSoftmaxBackward",
    dtypes=FLOATS,
    alike=Alike(shape=("y_grad", "y"), dtype=("y_grad", "y")),
    examples=(
        lambda: call(*(torch.rand(2, 3, 4, 8).half() for _ in range(2)), torch.rand(2, 1, 4, 8) > 0.5, 0.5, False),
    ),
)
def npu_scaled_masked_softmax_backward(
    y_grad: torch.Tensor, y: torch.Tensor, mask: torch.Tensor, scale: float, fixed_triu_mask: bool
) -> torch.Tensor:
    """Like ``y_grad``; y is the result of the softmax."""
    dtype = compute_dtype(y_grad, y)
    wide, result = y_grad.to(dtype), y.to(dtype)
    gradient = (wide - (wide * result).sum(-1, keepdim=True)) * result * scale
    return stored_like(y_grad, gradient.masked_fill(_left_out(y, mask, upper=fixed_triu_mask), 0.0), y_grad.dtype)
