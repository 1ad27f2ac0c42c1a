"""Padding with zeros.

``paddings`` holds, dimension by dimension from the first one, how many come before and after (operator documentation of
``torch_npu.npu_pad``).
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._record import Operator, call


@Operator(
    name="npu::npu_pad",
    source="operator documentation of torch_npu.npu_pad",
    dtypes=(torch.float16, torch.float32),
    examples=(lambda: call(torch.randn(2, 3).half(), [1, 0, 2, 1]),),
)
def npu_pad(input: torch.Tensor, paddings: list[int]) -> torch.Tensor:  # noqa: A002 - the schema's name
    """Contiguous, in input's dtype; ``paddings`` has two numbers for each dimension."""
    if len(paddings) != 2 * input.dim():
        raise ValueError(f"paddings must hold {2 * input.dim()} numbers, two for each dimension; it holds {paddings}.")
    turned = [number for before in range(len(paddings) - 2, -1, -2) for number in paddings[before : before + 2]]
    return torch.nn.functional.pad(input, turned).contiguous()
