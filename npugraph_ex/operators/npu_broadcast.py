"""A contiguous copy of a tensor expanded to a shape (operator documentation of ``torch_npu.npu_broadcast``)."""

from __future__ import annotations

import torch

from npugraph_ex.operators._record import Operator, call


@Operator(
    name="npu::npu_broadcast",
    source="operator documentation of torch_npu.npu_broadcast",
    dtypes=(torch.float16, torch.float32, torch.bool, torch.int32, torch.complex64),
    examples=(lambda: call(torch.randn(3, 1), [2, 3, 4]),),
)
def npu_broadcast(input: torch.Tensor, size: list[int]) -> torch.Tensor:  # noqa: A002 - the schema's name
    """Of shape ``size``; dimensions of size 1 are repeated, new ones come first."""
    return input.expand(size).clone(memory_format=torch.contiguous_format)
