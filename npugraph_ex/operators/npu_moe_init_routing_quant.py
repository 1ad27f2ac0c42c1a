"""Copies each token once for each expert that it goes to, in the order of the experts, quantised to int8.

Formula (CANN operator documentation, aclnnMoeInitRoutingQuantV2)::

    order             = sort(expert_idx), by expert, the earlier choice first
    y[i]              = x[order[i] // k]
    quant_mode 0:       expanded_x = round(y * scale + offset)
    quant_mode 1:       y = y * scale[expert];  s = max(abs(y)) / 127;  expanded_x = round(y / s), expanded_scale = s
    expanded_row_idx  = place of each choice in expanded_x, -1 where it was dropped

With ``drop_pad_mode`` 1 each expert has ``expert_capacity`` rows; later choices are dropped and free rows are zero.
``expert_tokens_num_mode`` 1 gives running sums of the experts' choices and 2 their numbers; results that were not asked for are
None.
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._precision import compute_dtype, round_to_int8, unsupported
from npugraph_ex.operators._record import Operator, call
from npugraph_ex.operators._routing import dynamic_quotient, route, taken

_NAME = "npu_moe_init_routing_quant"


@Operator(
    name="npu::npu_moe_init_routing_quant",
    source="CANN operator documentation, aclnnMoeInitRoutingQuantV2",
    covers={"drop_pad_mode": (0, 1), "expert_tokens_num_mode": (0, 1, 2)},
    dtypes=(torch.float16, torch.bfloat16, torch.float32),
    examples=(
        lambda: call(
            torch.randn(3, 4).half(),
            torch.tensor([[1, 0], [2, 1], [0, 3]], dtype=torch.int32),
            expert_num=4,
            expert_tokens_num_mode=2,
        ),
    ),
)
def npu_moe_init_routing_quant(
    x: torch.Tensor,
    expert_idx: torch.Tensor,
    *,
    scale: torch.Tensor | None = None,
    offset: torch.Tensor | None = None,
    active_num: int = 1024,
    expert_capacity: int = 0,
    expert_num: int = 256,
    drop_pad_mode: int = 0,
    expert_tokens_num_mode: int = 0,
    expert_tokens_before_capacity_flag: bool = False,
    quant_mode: int = 1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """``(expanded_x, expanded_row_idx, tokens cumulative or counted, tokens before dropping, expanded_scale)``.

    x: [N, H] floating; expert_idx: [N, K] int32; scale: [1] for quant_mode 0, [experts, H] or [1, H] for 1; offset: [1].
    expanded_x: int8, [N * K, H], or [active_num, H] if that is less and not 0, or [experts, capacity, H].
    """
    if quant_mode not in {0, 1}:
        raise unsupported(_NAME, "quant_mode", quant_mode, "0 and 1")
    n, k = expert_idx.shape
    padded = drop_pad_mode == 1
    rows = n * k if active_num <= 0 else min(active_num, n * k)
    routing = route(expert_idx, (0, expert_num), rows=rows, capacity=expert_capacity if padded else None)
    wide = compute_dtype(x, scale)
    y = taken(x, routing.source, k).to(wide)
    scales = None
    if quant_mode == 0:
        if scale is None or offset is None:
            raise ValueError(f"{_NAME}: quant_mode 0 takes scale [1] and offset [1]; one of them is None.")
        quotient = y * scale.reshape(-1)[0].to(wide) + offset.reshape(-1)[0].to(wide)
    else:
        if scale is not None:
            expert = taken(expert_idx.reshape(-1, 1), routing.source, 1).squeeze(1).long()
            y = y * (scale if scale.shape[0] == 1 else scale[expert]).to(wide)
        quotient, scales = dynamic_quotient(y)
    expanded = round_to_int8(quotient).masked_fill((routing.source < 0).unsqueeze(-1), 0)
    if padded:
        expanded = expanded.reshape(expert_num, expert_capacity, -1)
    counts = routing.counts.to(torch.int32)
    tokens = None
    if not padded and expert_tokens_num_mode:
        tokens = counts.cumsum(0).to(torch.int32) if expert_tokens_num_mode == 1 else counts
    before = counts if padded and expert_tokens_before_capacity_flag else None
    return expanded, routing.row_index.to(expert_idx.dtype), tokens, before, scales
