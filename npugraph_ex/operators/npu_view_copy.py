"""A copy into a tensor of any layout, converted and broadcast as ``Tensor.copy_`` does (op-plugin; CANN's ViewCopy)."""

from __future__ import annotations

import torch

from npugraph_ex.operators._record import Operator, call


@Operator(
    name="npu::npu_view_copy",
    source="op-plugin, aclops/ViewcopyKernelNpu.cpp",
    dtypes=(torch.float16, torch.bfloat16, torch.float32, torch.bool, torch.int32, torch.complex64),
    examples=(lambda: call(torch.randn(3, 4).t(), torch.randn(4, 3), False),),
)
def npu_view_copy(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    other: torch.Tensor,
    non_blocking: bool,
) -> torch.Tensor:
    """``input`` itself, with the elements of ``other``."""
    return input.copy_(other)
