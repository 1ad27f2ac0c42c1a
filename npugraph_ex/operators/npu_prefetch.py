"""A tensor read into the L2 cache before it is needed; nothing is computed.

Limits: operator documentation of ``torch_npu.npu_prefetch``.
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._record import Operator, call


@Operator(
    name="npu::npu_prefetch",
    source="operator documentation of torch_npu.npu_prefetch",
    dtypes=(torch.float16, torch.bfloat16, torch.float32),
    examples=(lambda: call(torch.randn(4, 4), None, 32, 8),),
)
def npu_prefetch(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    dependency: torch.Tensor | None,
    max_size: int,
    offset: int = 0,
) -> None:
    """``max_size`` bytes at most, ``offset`` bytes from the begin of ``input``."""
    size = input.numel() * input.element_size()
    if max_size <= 0 or not 0 <= offset < max(size, 1):
        raise ValueError(
            f"max_size must be above 0, and offset 0 to the {size} bytes of input; they are {max_size} and {offset}."
        )
