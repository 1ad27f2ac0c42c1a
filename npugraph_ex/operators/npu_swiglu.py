"""SwiGLU activation.

Formula (operator documentation of ``torch_npu.npu_swiglu``)::

    A, B   = the two halves of the input along dim
    output = A * sigmoid(A) * B
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from npugraph_ex.operators._precision import compute_dtype
from npugraph_ex.operators._record import Operator, call


def _canonical(rank: int, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """The dimension counted from 0."""
    dim = arguments["dim"]
    return {"dim": dim % rank} if isinstance(dim, int) and -rank <= dim < rank else {}


@Operator(
    name="npu::npu_swiglu",
    source="operator documentation of torch_npu.npu_swiglu",
    dtypes=(torch.float16, torch.bfloat16, torch.float32),
    canonical=_canonical,
    near_misses={"dim": (0,)},
    examples=(lambda: call(torch.randn(3, 16).half()),),
)
def npu_swiglu(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    dim: int = -1,
) -> torch.Tensor:
    """Contiguous, of the dtype of ``input`` and half its size along ``dim``, which must be even there."""
    if input.shape[dim] % 2:
        raise ValueError(
            f"npu_swiglu: the size along dim={dim} must be even to be split in two; "
            f"the input has shape {tuple(input.shape)}."
        )
    gate, up = input.to(compute_dtype(input)).chunk(2, dim=dim)
    return (gate * torch.sigmoid(gate) * up).to(input.dtype).contiguous()
