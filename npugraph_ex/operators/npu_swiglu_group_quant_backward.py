"""The gradients of the SwiGLU activation of a mixture's tokens, weighted and cut off.

Formula (CANN operator documentation, aclnnSwigluGroupQuantGrad), with A and B the halves of the last dimension of x, cut off as in
the forward where ``clamp_limit`` c is positive: a = min(A, c), b = min(max(B, -c), c)::

    g           = grad_y * weight                               grad_y where there is no weight
    grad_A      = g * b * silu'(a)                              0 where A >= c
    grad_B      = g * silu(a)                                   0 where B is outside (-c, c)
    grad_weight = sum(grad_y * y_origin)                        over the last dimension

Rows from ``sum(group_index)`` on have gradients 0.
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._alike import Alike
from npugraph_ex.operators._precision import FLOATS, compute_dtype, refused, stored_like
from npugraph_ex.operators._record import Operator, call

_NAME = "npu_swiglu_group_quant_backward"


@Operator(
    name="npu::npu_swiglu_group_quant_backward",
    source="CANN operator documentation, aclnnSwigluGroupQuantGrad",
    absent_on=("A2", "A3"),
    dtypes=FLOATS,
    alike=Alike(shape=("grad_y", "y_origin"), dtype=("x", "grad_y", "y_origin")),
    examples=(
        lambda: call(torch.randn(4, 8).half(), torch.randn(4, 16).half()),
        lambda: call(
            torch.randn(4, 8),
            torch.randn(4, 16),
            weight=torch.rand(4, 1),
            y_origin=torch.randn(4, 8),
            group_index=torch.tensor([1, 2]),
            clamp_limit=0.5,
        ),
    ),
)
def npu_swiglu_group_quant_backward(
    grad_y: torch.Tensor,
    x: torch.Tensor,
    *,
    weight: torch.Tensor | None = None,
    y_origin: torch.Tensor | None = None,
    group_index: torch.Tensor | None = None,
    clamp_limit: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(grad_x, grad_weight)``: like x [..., 2H] and weight, one number a row; the second is empty without a weight."""
    if weight is not None and y_origin is None:
        raise refused(_NAME, "y_origin", None, "given where weight is, since its gradient needs it")
    dtype = compute_dtype(grad_y, x, weight)
    gradient = grad_y.to(dtype).reshape(-1, grad_y.shape[-1])
    first, second = x.to(dtype).reshape(-1, x.shape[-1]).chunk(2, dim=-1)
    a, b = (
        (first.clamp(max=clamp_limit), second.clamp(-clamp_limit, clamp_limit)) if clamp_limit > 0 else (first, second)
    )
    inside = torch.arange(gradient.shape[0], device=x.device).unsqueeze(-1)
    inside = inside >= 0 if group_index is None else inside < group_index.sum()
    weighted = gradient if weight is None else gradient * weight.to(dtype).reshape(-1, 1)
    to_a, to_b = torch.ops.aten.silu_backward(weighted * b, a), weighted * torch.nn.functional.silu(a)
    if clamp_limit > 0:
        to_a, to_b = torch.where(first < clamp_limit, to_a, 0.0), torch.where(second.abs() < clamp_limit, to_b, 0.0)
    grad_x = torch.where(inside, torch.cat((to_a, to_b), -1), 0.0).reshape(x.shape)
    if weight is None or y_origin is None:
        return stored_like(x, grad_x, x.dtype), torch.empty(0, dtype=dtype, device=x.device)
    of_rows = (gradient * y_origin.to(dtype).reshape(gradient.shape)).sum(-1, keepdim=True)
    grad_weight = torch.where(inside, of_rows, 0.0).reshape(weight.shape)
    return stored_like(x, grad_x, x.dtype), stored_like(weight, grad_weight, weight.dtype)
