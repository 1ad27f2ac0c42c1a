"""Product with a transposed weight, and its gradients.

Formula (operator documentation of ``torch_npu.npu_linear``)::

    out = input @ weight^T + bias;   grad_input = grad @ weight;   grad_weight = grad^T @ input
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._precision import compute_dtype
from npugraph_ex.operators._record import Operator, call

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@Operator(
    name="npu::npu_linear",
    source="operator documentation of torch_npu.npu_linear",
    dtypes=_DTYPES,
    first_factor=0,
    examples=(lambda: call(torch.randn(3, 8).half(), torch.randn(4, 8).half(), torch.randn(4).half()),),
)
def npu_linear(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """[m, n] like input. input: [m, k]; weight: [n, k]; bias: [n]."""
    wide = compute_dtype(input, weight, bias)
    out = input.to(wide) @ weight.to(wide).t()
    return (out if bias is None else out + bias.to(wide)).to(input.dtype)


@Operator(
    name="npu::npu_linear_backward",
    source="derivative of npu_linear",
    dtypes=_DTYPES,
    first_factor=0,
    examples=(lambda: call(torch.randn(3, 4).half(), torch.randn(3, 8).half(), torch.randn(4, 8).half()),),
)
def npu_linear_backward(
    grad: torch.Tensor,
    input: torch.Tensor,  # noqa: A002 - the schema's name
    weight: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(grad of input [m, k], grad of weight [n, k])``; grad: [m, n]."""
    wide = compute_dtype(grad, input, weight)
    upper = grad.to(wide)
    return (upper @ weight.to(wide)).to(input.dtype), (upper.t() @ input.to(wide)).to(weight.dtype)
