"""Rotary position embedding of neighbouring elements, whose results stand in two halves.

Formula (operator documentation of ``torch_npu.npu_interleave_rope``)::

    q      = the even elements of x, then the odd ones
    output = q * cos + rotate_half(q) * sin
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._alike import Alike
from npugraph_ex.operators._precision import HALVES, compute_dtype, stored_like
from npugraph_ex.operators._record import Operator, call
from npugraph_ex.operators.npu_rotary_mul import rotated


def parted(x: torch.Tensor) -> torch.Tensor:
    """The even elements of the last dimension, then the odd ones."""
    return torch.cat((x[..., ::2], x[..., 1::2]), -1)


def embedded(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The embedding in the precision of the computation, not rounded."""
    dtype = compute_dtype(x, cos, sin)
    q = parted(x.to(dtype))
    return q * cos.to(dtype) + rotated(q, "half") * sin.to(dtype)


@Operator(
    name="npu::npu_interleave_rope",
    source="operator documentation of torch_npu.npu_interleave_rope",
    dtypes=HALVES,
    floats_only=True,
    alike=Alike(shape=("cos", "sin"), dtype=("x", "cos", "sin")),
    examples=(lambda: call(*(torch.randn(2, heads, 3, 64).half() for heads in (4, 1, 1))),),
)
def npu_interleave_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Like ``x`` [B, N, S, D]; ``cos`` and ``sin`` [B, 1, S or 1, D]."""
    return stored_like(x, embedded(x, cos, sin), x.dtype)
