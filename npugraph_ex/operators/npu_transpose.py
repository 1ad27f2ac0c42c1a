"""A copy of a tensor with its dimensions permuted (operator documentation of ``torch_npu.npu_transpose``).

The meta function gives the result the strides of a view, the document says that it is contiguous; here it follows the former.
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._record import Operator, call


@Operator(
    name="npu::npu_transpose",
    source="operator documentation of torch_npu.npu_transpose",
    dtypes=(torch.float16, torch.bfloat16, torch.float32, torch.bool, torch.int32, torch.complex64),
    examples=(lambda: call(torch.randn(2, 3, 5).half(), [2, 0, 1]),),
)
def npu_transpose(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    perm: list[int],
    require_contiguous: bool = True,
) -> torch.Tensor:
    """Dimension i of the result is dimension ``perm[i]`` of ``input``."""
    return input.permute(perm).clone()
