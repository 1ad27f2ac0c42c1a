"""One-hot vectors of class numbers.

Formula (operator documentation of ``torch_npu.npu_one_hot``)::

    out[i..., c] = on_value if input[i...] == c else off_value          c in 0 ... depth - 1

A class outside that range has a vector of ``off_value``.
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._precision import unsupported
from npugraph_ex.operators._record import Operator, call


@Operator(
    name="npu::npu_one_hot",
    source="operator documentation of torch_npu.npu_one_hot",
    dtypes=(torch.int32, torch.int64),
    examples=(lambda: call(torch.tensor([[5, 3], [2, 0]], dtype=torch.int32), depth=5, on_value=2, off_value=-1),),
)
def npu_one_hot(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    num_classes: int = -1,
    depth: int = 1,
    on_value: float = 1,
    off_value: float = 0,
) -> torch.Tensor:
    """float32, the shape of ``input`` and ``depth`` last. ``num_classes`` is, whatever its name says, the axis: -1."""
    if num_classes not in {-1, input.dim()}:
        raise unsupported("npu_one_hot", "num_classes", num_classes, "-1, the new last axis")
    hot = input.unsqueeze(-1) == torch.arange(depth, device=input.device)
    out = torch.full(hot.shape, off_value, dtype=torch.float32, device=input.device)
    return out.masked_fill(hot, on_value)
