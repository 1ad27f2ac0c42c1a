"""One element along a dimension replaced, as the gradient of a maximum needs it.

Formula (op-plugin, which calls it for the gradient of ``npu_max``)::

    out[..., indices[i...], ...] = updates[i...]          the index stands at dimension dim; all else is input
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._record import Operator, call


@Operator(
    name="npu::npu_scatter",
    source="op-plugin, aclops/ScatterV1KernelNpu.cpp",
    dtypes=(torch.float16, torch.float32),
    examples=(lambda: call(torch.randn(2, 3, 4), torch.randint(3, (2, 4), dtype=torch.int32), torch.randn(2, 4), 1),),
)
def npu_scatter(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    indices: torch.Tensor,
    updates: torch.Tensor,
    dim: int,
) -> torch.Tensor:
    """Like ``input``; indices and updates have its shape without dimension ``dim``."""
    return input.contiguous().scatter(dim, indices.long().unsqueeze(dim), updates.unsqueeze(dim))
