"""Largest and smallest element along a dimension with indices of int32, and their gradients.

Formula: that of ``torch.max`` and ``torch.min`` (operator documentation of ``torch_npu.npu_max`` and ``npu_min``).
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._record import Operator, call

_MAX, _MIN = ("operator documentation of torch_npu.npu_max", "operator documentation of torch_npu.npu_min")


@Operator(
    name="npu::npu_max.dim",
    source=_MAX,
    dtypes=(torch.float16, torch.float32),
    examples=(lambda: call(torch.randn(2, 3, 4), 1),),
)
def npu_max(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    dim: int,
    keepdim: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(values, indices)``, indices of int32."""
    values, indices = torch.max(input, dim, keepdim)
    return values, indices.int()


@Operator(
    name="npu::npu_min.dim",
    source=_MIN,
    dtypes=(torch.float16, torch.float32),
    examples=(lambda: call(torch.randn(2, 3, 4), 1),),
)
def npu_min(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    dim: int,
    keepdim: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(values, indices)``, indices of int32."""
    values, indices = torch.min(input, dim, keepdim)
    return values, indices.int()


@Operator(
    name="npu::npu_max_backward",
    source=_MAX,
    dtypes=(torch.float16, torch.float32),
    examples=(lambda: call(torch.randn(2, 4), 1, torch.randint(3, (2, 4), dtype=torch.int32), [2, 3, 4], False),),
)
def npu_max_backward(
    grad: torch.Tensor, dim: int, indices: torch.Tensor, sizes: list[int], keepdim: bool
) -> torch.Tensor:
    """Of shape ``sizes``: ``grad`` at the indices, 0 elsewhere."""
    if not keepdim and sizes:
        grad, indices = grad.unsqueeze(dim), indices.unsqueeze(dim)
    return grad.new_zeros(sizes).scatter(dim, indices.long(), grad)


@Operator(
    name="npu::npu_min_backward",
    source=_MIN,
    dtypes=(torch.float16, torch.float32),
    examples=(lambda: call(torch.randn(2, 1, 4), 1, torch.randint(3, (2, 1, 4), dtype=torch.int32), [2, 3, 4], True),),
)
def npu_min_backward(
    grad: torch.Tensor, dim: int, indices: torch.Tensor, sizes: list[int], keepdim: bool
) -> torch.Tensor:
    """As ``npu_max_backward``."""
    return npu_max_backward(grad, dim, indices, sizes, keepdim)
