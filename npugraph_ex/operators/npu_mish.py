"""Mish activation and its gradient.

Formula (operator documentation of ``torch_npu.npu_mish``; CANN's aclnnMish)::

    mish(x) = x * tanh(ln(1 + exp(x)))
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._precision import FLOATS, compute_dtype, stored_like
from npugraph_ex.operators._record import Operator, call

_SOURCE = "operator documentation of torch_npu.npu_mish"


@Operator(
    name="npu::npu_mish",
    dtypes=FLOATS,
    floats_only=True,
    source=_SOURCE,
    examples=(lambda: call(torch.randn(3, 16).half()),),
)
def npu_mish(input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the schema's name
    """Like ``input``."""
    return stored_like(input, torch.nn.functional.mish(input.to(compute_dtype(input))), input.dtype)


@Operator(
    name="npu::npu_mish_backward",
    dtypes=FLOATS,
    floats_only=True,
    source=_SOURCE,
    examples=(lambda: call(torch.randn(3, 16).half(), torch.randn(3, 16).half()),),
)
def npu_mish_backward(grad: torch.Tensor, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the schema's name
    """Like ``input``, and so is ``grad``."""
    dtype = compute_dtype(grad, input)
    return stored_like(input, torch.ops.aten.mish_backward(grad.to(dtype), input.to(dtype)), input.dtype)
