"""SwiGLU activation with cut-off halves, as the GPT-OSS models have it.

Formula (operator documentation of ``torch_npu.npu_clipped_swiglu``), on x with the dimensions from ``dim`` on as one::

    A, B = the even and the odd elements (interleaved), or the first and the second half
    A    = min(A, limit)
    B    = min(max(B, -limit), limit)
    y    = A * sigmoid(alpha * A) * (B + bias)

With ``group_index`` only the first ``sum(group_index)`` rows are computed, a row being what stands before ``dim``. The device does
not write the others; here they are 0.
"""

from __future__ import annotations

import math

import torch

from npugraph_ex.operators._precision import FLOATS, compute_dtype
from npugraph_ex.operators._record import Operator, call

_NAME = "npu_clipped_swiglu"


def clipped(a: torch.Tensor, b: torch.Tensor, *, alpha: float, limit: float, bias: float) -> torch.Tensor:
    """``y`` of the two halves, in their dtype."""
    a = a.clamp(max=limit)
    return a * torch.sigmoid(alpha * a) * (b.clamp(-limit, limit) + bias)


@Operator(
    name="npu::npu_clipped_swiglu",
    dtypes=FLOATS,
    source="operator documentation of torch_npu.npu_clipped_swiglu",
    examples=(
        lambda: call(torch.randn(3, 16).half()),
        lambda: call(torch.randn(3, 4, 6), group_index=torch.tensor([1, 1]), dim=1, interleaved=False),
    ),
)
def npu_clipped_swiglu(
    x: torch.Tensor,
    *,
    group_index: torch.Tensor | None = None,
    dim: int = -1,
    alpha: float = 1.702,
    limit: float = 7.0,
    bias: float = 1.0,
    interleaved: bool = True,
) -> torch.Tensor:
    """Contiguous, of the dtype of ``x`` and half its size along ``dim``."""
    if x.dim() < 2 or x.shape[dim] % 2:
        raise ValueError(
            f"{_NAME}: x must have 2 or more dimensions and an even size along dim={dim}; it has shape {tuple(x.shape)}."
        )
    at = dim % x.dim()
    rows = x.to(compute_dtype(x)).reshape(math.prod(x.shape[:at]), math.prod(x.shape[at:]))
    a, b = (rows[:, ::2], rows[:, 1::2]) if interleaved else rows.chunk(2, dim=-1)
    y = clipped(a, b, alpha=alpha, limit=limit, bias=bias)
    if group_index is not None:
        computed = torch.arange(y.shape[0], device=y.device) < group_index.sum()
        y = torch.where(computed.unsqueeze(-1), y, 0.0)
    return y.reshape(*x.shape[:at], x.shape[at] // 2, *x.shape[at + 1 :]).to(x.dtype).contiguous()
