"""A tensor filled with ones in place (operator documentation of ``torch_npu.one_``)."""

from __future__ import annotations

import torch

from npugraph_ex.operators._record import Operator, call


@Operator(
    name="npu::one_",
    source="operator documentation of torch_npu.one_",
    dtypes=(torch.float16, torch.bfloat16, torch.float32),
    examples=(lambda: call(torch.randn(2, 3).half()),),
)
def one_(input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the schema's name
    """``input`` itself, filled with 1."""
    return input.fill_(1)
