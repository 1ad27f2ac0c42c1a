"""Where the rows of each expert end.

Formula (operator documentation of ``torch_npu.npu_moe_compute_expert_tokens``)::

    out[i] = how many elements of sorted_expert_for_source_row are at most i
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._record import Operator, call


@Operator(
    name="npu::npu_moe_compute_expert_tokens",
    source="operator documentation of torch_npu.npu_moe_compute_expert_tokens",
    dtypes=(torch.int32,),
    examples=(lambda: call(torch.tensor([0, 0, 1, 3], dtype=torch.int32), 5),),
)
def npu_moe_compute_expert_tokens(sorted_expert_for_source_row: torch.Tensor, num_expert: int) -> torch.Tensor:
    """[num_expert] of the dtype of ``sorted_expert_for_source_row``, a sorted int32 vector."""
    experts = torch.arange(num_expert, dtype=sorted_expert_for_source_row.dtype)
    ends = torch.searchsorted(sorted_expert_for_source_row, experts, right=True)
    return ends.to(sorted_expert_for_source_row.dtype)
