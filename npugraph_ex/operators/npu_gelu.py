"""GELU activation, its gradient, and its product with a second half.

Formula (operator documentation of ``torch_npu.npu_gelu`` and ``torch_npu.npu_gelu_mul``)::

    approximate="none":  gelu(x) = x / 2 * (1 + erf(x / sqrt(2)))
    approximate="tanh":  gelu(x) = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))

    npu_gelu_backward:   grad_output * gelu'(input)
    npu_gelu_mul:        gelu(A) * B                A, B = the halves of the last dimension
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._precision import FLOATS, compute_dtype, gelu, stored_like, unsupported
from npugraph_ex.operators._record import Operator, call

APPROXIMATIONS = ("none", "tanh")


def checked_gelu(operator: str, x: torch.Tensor, approximate: str) -> torch.Tensor:
    """``gelu(x)`` in the dtype of ``x``; another approximation than the two documented raises."""
    if approximate not in APPROXIMATIONS:
        raise unsupported(operator, "approximate", approximate, "'none' and 'tanh'")
    return gelu(x, approximate)


@Operator(
    name="npu::npu_gelu",
    dtypes=FLOATS,
    floats_only=True,
    source="operator documentation of torch_npu.npu_gelu",
    near_misses={"approximate": ("tanh",)},
    examples=(
        lambda: call(torch.randn(3, 16).half()),
        lambda: call(torch.randn(3, 16).bfloat16().t(), approximate="tanh"),
    ),
)
def npu_gelu(input: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:  # noqa: A002 - the schema's name
    """Like ``input``."""
    return stored_like(input, checked_gelu("npu_gelu", input.to(compute_dtype(input)), approximate), input.dtype)


@Operator(
    name="npu::npu_gelu_backward",
    dtypes=FLOATS,
    floats_only=True,
    source="operator documentation of torch_npu.npu_gelu; CANN operator documentation, aclnnGeluBackwardV2",
    examples=(lambda: call(torch.randn(3, 16).half(), torch.randn(3, 16).half(), approximate="tanh"),),
)
def npu_gelu_backward(
    grad_output: torch.Tensor,
    input: torch.Tensor,  # noqa: A002 - the schema's name
    *,
    approximate: str = "none",
) -> torch.Tensor:
    """Like ``input``, and so is ``grad_output``."""
    if approximate not in APPROXIMATIONS:
        raise unsupported("npu_gelu_backward", "approximate", approximate, "'none' and 'tanh'")
    dtype = compute_dtype(grad_output, input)
    gradient = torch.ops.aten.gelu_backward(grad_output.to(dtype), input.to(dtype), approximate=approximate)
    return stored_like(input, gradient, input.dtype)


@Operator(
    name="npu::npu_gelu_mul",
    dtypes=FLOATS,
    floats_only=True,
    source="operator documentation of torch_npu.npu_gelu_mul",
    examples=(lambda: call(torch.randn(3, 16).half()),),
)
def npu_gelu_mul(input: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:  # noqa: A002 - the schema's name
    """Contiguous, of the dtype of ``input`` and half its last dimension, which must be even."""
    if input.dim() < 2 or input.shape[-1] % 2:
        raise ValueError(
            f"npu_gelu_mul: input must have 2 or more dimensions, the last of even size; it has shape {tuple(input.shape)}."
        )
    first, second = input.to(compute_dtype(input)).chunk(2, dim=-1)
    return (checked_gelu("npu_gelu_mul", first, approximate) * second).to(input.dtype).contiguous()
