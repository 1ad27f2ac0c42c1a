"""SwiGLU activation.

Formula (operator documentation of ``torch_npu.npu_swiglu``)::

    A, B   = the two halves of the input along dim
    output = A * sigmoid(A) * B
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._precision import compute_dtype


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
