"""SwiGLU activation and its gradient.

Formula (operator documentation of ``torch_npu.npu_swiglu``)::

    A, B   = the two halves of the input along dim
    output = A * sigmoid(A) * B

The gradient (CANN's aclnnSwiGluGrad) of A is ``grad_output * B * (s + A s (1 - s))`` with s = sigmoid(A), that of B
``grad_output * A * s``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from npugraph_ex.operators._alike import Alike
from npugraph_ex.operators._precision import FLOATS, compute_dtype, refused, stored_like
from npugraph_ex.operators._record import Operator, call


def _canonical(rank: int, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """The dimension counted from 0."""
    dim = arguments["dim"]
    return {"dim": dim % rank} if isinstance(dim, int) and -rank <= dim < rank else {}


def _refuse_odd(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    dim: int = -1,
) -> None:
    if -input.dim() <= dim < input.dim() and input.shape[dim] % 2:
        raise refused("npu_swiglu", f"input's size along dim={dim}", input.shape[dim], "even")


@Operator(
    name="npu::npu_swiglu",
    dtypes=FLOATS,
    floats_only=True,
    source="operator documentation of torch_npu.npu_swiglu",
    canonical=_canonical,
    constraints=_refuse_odd,
    near_misses={"dim": (0,)},
    examples=(lambda: call(torch.randn(3, 16).half()),),
)
def npu_swiglu(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    dim: int = -1,
) -> torch.Tensor:
    """Contiguous, of the dtype of ``input`` and half its size along ``dim``, which must be even there."""
    gate, up = _halves("npu_swiglu", input.to(compute_dtype(input)), dim)
    return (gate * torch.sigmoid(gate) * up).to(input.dtype).contiguous()


def _halves(operator: str, x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``x`` split in two along ``dim``."""
    if x.shape[dim] % 2:
        raise ValueError(
            f"{operator}: the size along dim={dim} must be even to be split in two; "
            f"the input has shape {tuple(x.shape)}."
        )
    first, second = x.chunk(2, dim=dim)
    return first, second


@Operator(
    name="npu::npu_swiglu_backward",
    dtypes=FLOATS,
    floats_only=True,
    source="CANN operator documentation, aclnnSwiGluGrad",
    alike=Alike(dtype=("input", "grad_output")),
    examples=(lambda: call(torch.randn(3, 8).half(), torch.randn(3, 16).half()),),
)
def npu_swiglu_backward(
    grad_output: torch.Tensor,
    input: torch.Tensor,  # noqa: A002 - the schema's name
    dim: int = -1,
) -> torch.Tensor:
    """Like ``input``; grad_output has half its size along ``dim``."""
    dtype = compute_dtype(grad_output, input)
    gradient = grad_output.to(dtype)
    gate, up = _halves("npu_swiglu_backward", input.to(dtype), dim)
    to_gate = torch.ops.aten.silu_backward(gradient * up, gate)
    to_up = gradient * torch.nn.functional.silu(gate)
    return stored_like(input, torch.cat((to_gate, to_up), dim=dim), input.dtype)
