"""Sequences of a batch normalised over their valid elements, as speech features are.

Formula (op-plugin: the reference of its test; the variance is that of a sample, and epsilon is added to the deviation)::

    out[b, f, t] = (input[b, f, t] - mean) / (std + 1e-5)

over t < seq_len[b]; for each feature alone (``normalize_type`` 0), or over all features (1).
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._precision import compute_dtype
from npugraph_ex.operators._record import Operator, call

_EPSILON = 1e-5


@Operator(
    name="npu::npu_normalize_batch",
    source="op-plugin, aclops/NormalizeBatchKernelNpu.cpp",
    dtypes=(torch.float32,),
    examples=(lambda: call(torch.randn(2, 3, 6), torch.tensor([4, 6], dtype=torch.int32), 1),),
)
def npu_normalize_batch(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    seq_len: torch.Tensor,
    normalize_type: int = 0,
) -> torch.Tensor:
    """Contiguous, like ``input`` [B, F, T]; seq_len [B] of int32."""
    if normalize_type not in {0, 1}:
        raise ValueError(f"normalize_type must be 0 or 1; it is {normalize_type}.")
    wide = input.to(compute_dtype(input))
    valid = (torch.arange(input.shape[-1], device=input.device) < seq_len.unsqueeze(-1)).unsqueeze(1).expand_as(wide)
    dims = (-1, -2)[: normalize_type + 1]
    count = valid.sum(dims, keepdim=True)
    mean = torch.where(valid, wide, 0).sum(dims, keepdim=True) / count
    variance = torch.where(valid, (wide - mean).square(), 0).sum(dims, keepdim=True) / (count - 1)
    return ((wide - mean) / (variance.sqrt() + _EPSILON)).to(input.dtype).contiguous()
