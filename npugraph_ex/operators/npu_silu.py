"""SiLU activation, in place too, and its gradient.

Formula (operator documentation of ``torch_npu.npu_silu``)::

    silu(x) = x * sigmoid(x)
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._precision import FLOATS, compute_dtype, stored_like
from npugraph_ex.operators._record import Call, Operator, call

_SOURCE = "operator documentation of torch_npu.npu_silu"


def _example() -> Call:
    return call(torch.randn(3, 16).half().t())


@Operator(name="npu::npu_silu", dtypes=FLOATS, floats_only=True, source=_SOURCE, examples=(_example,))
def npu_silu(input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the schema's name
    """Like ``input``."""
    return stored_like(input, torch.nn.functional.silu(input.to(compute_dtype(input))), input.dtype)


@Operator(name="npu::npu_silu_", dtypes=FLOATS, floats_only=True, source=_SOURCE, examples=(_example,))
def npu_silu_(input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the schema's name
    """``input`` itself, changed."""
    return input.copy_(npu_silu(input))


@Operator(
    name="npu::npu_silu_backward",
    dtypes=FLOATS,
    floats_only=True,
    source="CANN operator documentation, aclnnSiluBackward",
    examples=(lambda: call(*(torch.randn(3, 16).half() for _ in range(3))),),
)
def npu_silu_backward(grad_output: torch.Tensor, x0: torch.Tensor, x1: torch.Tensor) -> torch.Tensor:
    """Like ``grad_output``; x0 is the input of ``npu_silu`` and x1 its result, which the formula does not need."""
    dtype = compute_dtype(grad_output, x0)
    gradient = torch.ops.aten.silu_backward(grad_output.to(dtype), x0.to(dtype))
    return stored_like(grad_output, gradient, grad_output.dtype)
