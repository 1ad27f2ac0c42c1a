"""A contiguous copy of what a shape, strides and an offset describe in a tensor's elements (op-plugin; CANN's AsStrided)."""

from __future__ import annotations

import torch

from npugraph_ex.operators._record import Operator, call


@Operator(
    name="npu::npu_stride_copy",
    source="op-plugin, aclops/AsStridedKernelNpu.cpp",
    dtypes=(torch.float16, torch.bfloat16, torch.float32, torch.bool, torch.int32, torch.complex64),
    examples=(lambda: call(torch.randn(4, 5), [2, 3], [1, 6], 2),),
)
def npu_stride_copy(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    shape: list[int],
    stride: list[int],
    storage_offset: float,
) -> torch.Tensor:
    """Of shape ``shape``; strides and offset count elements of ``input`` as it lies in memory, from its first one."""
    return input.as_strided(shape, stride, input.storage_offset() + int(storage_offset)).clone(
        memory_format=torch.contiguous_format
    )
