"""Copies each token once for each expert that it goes to, in the order of the experts.

Formula (operator documentation of ``torch_npu.npu_moe_init_routing``)::

    expanded_expert_idx, sorted_row_idx = sort(expert_idx, row_idx)      by expert, the earlier one first
    expanded_row_idx[sorted_row_idx[i]] = i
    expanded_x[i] = x[sorted_row_idx[i] % rows]                          for i below min(rows, active_num) * k
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._record import Operator, call


@Operator(
    name="npu::npu_moe_init_routing",
    source="operator documentation of torch_npu.npu_moe_init_routing",
    dtypes=(torch.float16, torch.bfloat16, torch.float32),
    examples=(
        lambda: call(
            torch.randn(3, 4).half(),
            torch.arange(6, dtype=torch.int32).reshape(2, 3).t().contiguous(),
            torch.tensor([[1, 0], [2, 1], [0, 2]], dtype=torch.int32),
            2,
        ),
    ),
)
def npu_moe_init_routing(
    x: torch.Tensor, row_idx: torch.Tensor, expert_idx: torch.Tensor, active_num: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(expanded_x, expanded_row_idx, expanded_expert_idx)``: [min(rows, active_num) * k, h], and twice [rows * k] int32.

    x: [rows, h]; row_idx and expert_idx: [rows, k] int32; row_idx is that of ``npu_moe_gating_top_k_softmax``.
    """
    experts, order = expert_idx.reshape(-1).sort(stable=True)
    rows = row_idx.reshape(-1)[order].long()
    places = torch.empty_like(rows)
    places[rows] = torch.arange(rows.numel(), device=rows.device)
    active = min(active_num, x.shape[0]) * expert_idx.shape[1]
    return x[rows[:active] % max(x.shape[0], 1)], places.to(row_idx.dtype), experts.to(row_idx.dtype)
