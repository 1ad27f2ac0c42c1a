"""A slice of a tensor by its first element and its size (operator documentation of ``torch_npu.npu_slice``)."""

from __future__ import annotations

import torch

from npugraph_ex.operators._record import Operator, call


@Operator(
    name="npu::npu_slice",
    source="operator documentation of torch_npu.npu_slice",
    dtypes=(torch.float16, torch.float32, torch.bool, torch.int32, torch.complex64),
    examples=(lambda: call(torch.randn(3, 5), [1, 2], [2, 3]),),
)
def npu_slice(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    offsets: list[int],
    size: list[int],
) -> torch.Tensor:
    """Contiguous, of shape ``size``."""
    out = input
    for dim, (begin, length) in enumerate(zip(offsets, size, strict=True)):
        out = out.narrow(dim, begin, length)
    return out.clone(memory_format=torch.contiguous_format)
