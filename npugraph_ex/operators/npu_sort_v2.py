"""Sorted elements along a dimension, without their indices (operator documentation of ``torch_npu.npu_sort_v2``)."""

from __future__ import annotations

import torch

from npugraph_ex.operators._record import Operator, call


@Operator(
    name="npu::npu_sort_v2",
    source="operator documentation of torch_npu.npu_sort_v2",
    dtypes=(torch.float16,),
    examples=(lambda: call(torch.randn(3, 8).half(), -1, True),),
)
def npu_sort_v2(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    dim: int = -1,
    descending: bool = False,
) -> torch.Tensor:
    """Contiguous, in the shape and dtype of ``input``."""
    return input.sort(dim, descending).values.contiguous()
