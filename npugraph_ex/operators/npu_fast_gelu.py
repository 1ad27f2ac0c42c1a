"""GELU activation by a sigmoid, and its gradient.

Formula (operator documentation of ``torch_npu.npu_fast_gelu``)::

    fast_gelu(x) = x / (1 + exp(-1.702 x))

``fast_gelu`` is the older name of ``npu_fast_gelu``. The gradient is ``grad * (s + 1.702 x s (1 - s))`` with s = sigmoid(1.702 x).
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._alike import Alike
from npugraph_ex.operators._precision import FLOATS, compute_dtype, stored_like
from npugraph_ex.operators._record import Call, Operator, call

_SLOPE = 1.702
_SOURCE = "operator documentation of torch_npu.npu_fast_gelu"


def _example() -> Call:
    return call(torch.randn(3, 16).half().t())


@Operator(name="npu::npu_fast_gelu", dtypes=FLOATS, floats_only=True, source=_SOURCE, examples=(_example,))
def npu_fast_gelu(input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the schema's name
    """Like ``input``."""
    x = input.to(compute_dtype(input))
    return stored_like(input, x * torch.sigmoid(_SLOPE * x), input.dtype)


@Operator(name="npu::fast_gelu", dtypes=FLOATS, floats_only=True, source=_SOURCE, examples=(_example,))
def fast_gelu(input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the schema's name
    """As ``npu_fast_gelu``."""
    return npu_fast_gelu(input)


@Operator(
    name="npu::npu_fast_gelu_backward",
    dtypes=FLOATS,
    floats_only=True,
    source=_SOURCE,
    alike=Alike(shape=("grad", "input"), dtype=("grad", "input")),
    examples=(lambda: call(torch.randn(3, 16).half(), torch.randn(3, 16).half()),),
)
def npu_fast_gelu_backward(grad: torch.Tensor, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the schema's name
    """Like ``input``, and so is ``grad``."""
    dtype = compute_dtype(grad, input)
    x = input.to(dtype)
    s = torch.sigmoid(_SLOPE * x)
    return stored_like(input, grad.to(dtype) * (s + _SLOPE * x * s * (1 - s)), input.dtype)
