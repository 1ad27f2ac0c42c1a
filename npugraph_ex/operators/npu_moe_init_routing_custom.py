"""Tokens sorted by expert: vLLM-Ascend's own copy of ``npu_moe_init_routing_v2``, same formula (csrc/moe_init_routing_custom)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from npugraph_ex.operators._record import Operator, call
from npugraph_ex.operators.npu_moe_init_routing_v2 import npu_moe_init_routing_v2


@Operator(
    name="_C_ascend::npu_moe_init_routing_custom",
    source="vLLM-Ascend, csrc/torch_binding.cpp and csrc/moe_init_routing_custom",
    dtypes=(torch.float16, torch.bfloat16, torch.float32),
    schema=(
        "(Tensor x, Tensor expert_idx, *, Tensor? scale=None, Tensor? offset=None, int active_num=-1, int expert_capacity=-1, "
        "int expert_num=-1, int drop_pad_mode=0, int expert_tokens_num_type=0, bool expert_tokens_num_flag=False, "
        "int quant_mode=0, int[2] active_expert_range=[], int row_idx_type=0) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
    fake=npu_moe_init_routing_v2,
    examples=(
        lambda: call(
            torch.randn(3, 4),
            torch.tensor([[1, 0], [2, 1], [0, 3]], dtype=torch.int32),
            expert_num=4,
            expert_tokens_num_type=1,
            expert_tokens_num_flag=True,
            quant_mode=-1,
            active_expert_range=[0, 4],
        ),
    ),
)
def npu_moe_init_routing_custom(
    x: torch.Tensor,
    expert_idx: torch.Tensor,
    *,
    scale: torch.Tensor | None = None,
    offset: torch.Tensor | None = None,
    active_num: int = -1,
    expert_capacity: int = -1,
    expert_num: int = -1,
    drop_pad_mode: int = 0,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = 0,
    active_expert_range: Sequence[int] = [],
    row_idx_type: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """As ``npu_moe_init_routing_v2``."""
    return npu_moe_init_routing_v2(
        x, expert_idx, scale=scale, offset=offset, active_num=active_num, expert_capacity=expert_capacity,
        expert_num=expert_num, drop_pad_mode=drop_pad_mode, expert_tokens_num_type=expert_tokens_num_type,
        expert_tokens_num_flag=expert_tokens_num_flag, quant_mode=quant_mode, active_expert_range=active_expert_range,
        row_idx_type=row_idx_type,
    )  # fmt: skip
