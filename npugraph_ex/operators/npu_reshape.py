"""A copy of a tensor in another shape (operator documentation of ``torch_npu.npu_reshape``)."""

from __future__ import annotations

import torch

from npugraph_ex.operators._precision import unsupported
from npugraph_ex.operators._record import Operator, call


@Operator(
    name="npu::npu_reshape",
    source="operator documentation of torch_npu.npu_reshape; op-plugin",
    dtypes=(torch.float16, torch.bfloat16, torch.float32, torch.bool, torch.int32, torch.complex64),
    examples=(lambda: call(torch.randn(2, 6), [3, 4]),),
)
def npu_reshape(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    shape: list[int],
    can_refresh: bool = False,
) -> torch.Tensor:
    """New memory of shape ``shape``. ``can_refresh`` would leave it unwritten; op-plugin's kernel copies nothing then."""
    if can_refresh:
        raise unsupported("npu_reshape", "can_refresh", can_refresh, "False")
    return input.reshape(shape).clone(memory_format=torch.contiguous_format)
