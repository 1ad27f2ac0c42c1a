"""Maps the experts that a router names to the copies of them that are deployed, and prunes weak choices.

Formula (operator documentation of ``torch_npu.npu_moe_update_expert``), for token i, its k-th expert e, and the row of e in
``eplb_table``, which holds the number of copies and then their places::

    balance_mode 0:  copy = local_rank_id // ceil(world_size / copies)
    balance_mode 1:  copy = i % copies
    balanced_expert_ids[i, k]  = eplb_table[e, 1 + copy]
    balanced_active_mask[i, k] = active_mask[i] and pruning_threshold[k] * sum(expert_scales[i]) < expert_scales[i, k]

Without ``expert_scales`` the device leaves the mask unwritten; here it is False everywhere.
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._precision import compute_dtype, unsupported
from npugraph_ex.operators._record import Operator, call

_NAME = "npu_moe_update_expert"


@Operator(
    name="npu::npu_moe_update_expert",
    source="operator documentation of torch_npu.npu_moe_update_expert",
    dtypes=(torch.float16, torch.bfloat16, torch.float32),
    examples=(
        lambda: call(
            torch.tensor([[0, 2], [1, 0]], dtype=torch.int32),
            torch.tensor([[2, 5, 1], [1, 4, 0], [2, 3, 2]], dtype=torch.int32),
            expert_scales=torch.tensor([[0.7, 0.3], [0.6, 0.1]]),
            pruning_threshold=torch.tensor([0.1, 0.2]),
            active_mask=torch.tensor([True, True]),
            local_rank_id=1,
            world_size=2,
        ),
    ),
)
def npu_moe_update_expert(
    expert_ids: torch.Tensor,
    eplb_table: torch.Tensor,
    *,
    expert_scales: torch.Tensor | None = None,
    pruning_threshold: torch.Tensor | None = None,
    active_mask: torch.Tensor | None = None,
    local_rank_id: int = -1,
    world_size: int = -1,
    balance_mode: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(balanced_expert_ids, balanced_active_mask)``, [N, K] of the dtype of expert_ids, and [N, K] bool.

    expert_ids: [N, K]; eplb_table: [experts, 1 + places] int32; expert_scales: [N, K]; pruning_threshold: [K] or [1, K];
    active_mask: [N] bool.
    """
    rows = eplb_table.long()[expert_ids.long()]
    copies = rows[..., 0]
    if balance_mode == 0:
        if not 0 <= local_rank_id < world_size:
            raise ValueError(
                f"{_NAME}: balance_mode 0 takes local_rank_id from 0 to world_size - 1; they are {local_rank_id} and "
                f"{world_size}."
            )
        copy = local_rank_id // -(-world_size // copies)
    elif balance_mode == 1:
        copy = torch.arange(expert_ids.shape[0]).unsqueeze(1) % copies
    else:
        raise unsupported(_NAME, "balance_mode", balance_mode, "0 (by rank) and 1 (by token)")
    chosen = rows.gather(-1, copy.unsqueeze(-1) + 1).squeeze(-1)
    mask = torch.zeros(expert_ids.shape, dtype=torch.bool)
    if expert_scales is not None and pruning_threshold is not None:
        scales = expert_scales.to(compute_dtype(expert_scales, pruning_threshold))
        mask = pruning_threshold.to(scales.dtype).reshape(1, -1) * scales.sum(-1, keepdim=True) < scales
        if active_mask is not None:
            mask = mask & active_mask.unsqueeze(1)
    return chosen.to(expert_ids.dtype), mask
