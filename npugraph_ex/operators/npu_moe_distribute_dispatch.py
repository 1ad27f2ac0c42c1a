"""Sends each token to the ranks of its experts; ``npu_moe_distribute_combine`` brings the results back.

Formula (operator documentation of ``torch_npu.npu_moe_distribute_dispatch`` and ``..._v2``), with W ranks and e experts on each::

    expand_x            = the tokens that chose this rank's experts, by expert, then by sender, then by token
    expert_token_nums   = tokens of each expert (expert_token_nums_type 1), or their running sums (0)
    ep_recv_counts      = running sums of the tokens of each expert from each rank
    quant_mode 2:         x = x * scales[expert];  s = max(abs(x)) / 127;  expand_x = round(x / s), dynamic_scales = s
    int32 x:              dynamic_scales = the tokens' scales
    expand_scales       = the tokens' expert_scales

    first form, expand_idx [tokens * k]:  for each choice of this rank, how many of its earlier ones have the same expert
    v2, assist_info_for_combine:          for each row of expand_x its sender, token and choice

The device gives ``expand_idx``, ``assist_info_for_combine`` and ``ep_recv_counts`` values of its own, which only combine reads.
``x_active_mask`` leaves tokens, or choices, out. Choices of zero, copy and constant experts go nowhere; combine computes those.
What the device leaves unwritten is zeros here: rows behind the last token, and results that were not asked for.

Not covered: shared experts on ranks of their own, a second group (``tp_world_size`` 2), other quantisations (``quant_mode`` 1, 3
to 5, ``y_dtype``), ``elastic_info``; ``performance_info`` stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from npugraph_ex.operators._distribution import (
    Experts,
    Received,
    check_quantisation,
    filled,
    padded,
    quantised,
    received,
    stacked,
)
from npugraph_ex.operators._precision import refused, unsupported
from npugraph_ex.operators._ranks import Steps
from npugraph_ex.operators._record import Operator, call

_NAME, _V2 = "npu_moe_distribute_dispatch", "npu_moe_distribute_dispatch_v2"
_SLOT = 128
"""Elements of ``assist_info_for_combine`` for each row."""
_RANKS_OF_A_SERVER = 8


def _dispatch(
    experts: Experts,
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    scales: torch.Tensor | None,
    mask: torch.Tensor | None,
    expert_scales: torch.Tensor | None,
    options: Mapping[str, int],
) -> Steps:
    """All results but the third one, and what this rank received."""
    experts.check(
        expert_ids, x.shape[-1], shared_expert_rank_num=options["shared_expert_rank_num"], tp_world_size=options["tp_world_size"],
        expert_shard_type=options["expert_shard_type"],
    )  # fmt: skip
    mode = options["quant_mode"]
    check_quantisation(experts.name, x, scales, mode, experts.number)
    if options["expert_token_nums_type"] not in {0, 1}:
        raise refused(experts.name, "expert_token_nums_type", options["expert_token_nums_type"], "0 or 1")
    if expert_scales is not None and expert_scales.shape != expert_ids.shape:
        raise refused(
            experts.name, "expert_scales", expert_scales.shape, f"one for each choice, {tuple(expert_ids.shape)}"
        )
    tokens, packed = experts.tokens(x.shape[0]), x.dtype == torch.int32
    chosen = experts.masked(expert_ids, mask)
    beside = [padded(tensor, tokens) for tensor in (scales if packed else None, expert_scales) if tensor is not None]
    everyone = yield experts.exchange(padded(x, tokens), padded(chosen, tokens, -1), *beside)
    experts.check_values(expert_ids, mask)
    found = received(experts, stacked(everyone, 1))
    rows, scale = quantised(
        experts.name, stacked(everyone, 0)[found.sender, found.token], found.expert, None if packed else scales, mode
    )
    if packed:
        scale = stacked(everyone, 2)[found.sender, found.token]
    weights = None if expert_scales is None else stacked(everyone, -1)[found.sender, found.token, found.choice]
    size, ranks = tokens * experts.ranks * min(experts.local, expert_ids.shape[1]), experts.ranks
    numbers = found.counts.sum(1)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    behind = (
        2 * tokens * ranks * expert_ids.shape[1] * (ranks // _RANKS_OF_A_SERVER) if expert_scales is not None else 0
    )
    return found, (
        filled(size, x.shape[1], dtype=rows.dtype, rows=rows),
        filled(size, dtype=wide, rows=scale),
        numbers if options["expert_token_nums_type"] == 1 else numbers.cumsum(0),
        filled(ranks * experts.local + behind, dtype=torch.int32, rows=found.counts.flatten().cumsum(0).int()),
        filled(options["tp_world_size"], dtype=torch.int32),
        filled(size if expert_scales is not None else 0, dtype=wide, rows=weights),
    )


def ordinals(expert_ids: torch.Tensor) -> torch.Tensor:
    """For each choice, how many earlier ones of this rank have the same expert: int32, flat."""
    flat = expert_ids.flatten()
    same = flat.unsqueeze(0) == flat.unsqueeze(1)
    return same.tril(-1).sum(1).int()


def _assistance(found: Received, size: int) -> torch.Tensor:
    """``assist_info_for_combine``: sender, token and choice of each row."""
    return filled(
        size, dtype=torch.int32, rows=torch.stack([found.sender, found.token, found.choice], 1).int().flatten()
    )


def _choices() -> torch.Tensor:
    return torch.tensor([[0, 3], [2, 1], [3, 2]], dtype=torch.int32)


@Operator(
    name="npu::npu_moe_distribute_dispatch",
    source="operator documentation of torch_npu.npu_moe_distribute_dispatch",
    dtypes=(torch.float16, torch.bfloat16),
    examples=(
        lambda: call(torch.randn(3, 32).half(), _choices(), "group", 2, 0, 4),
        lambda: call(
            torch.randn(3, 32).half(), _choices(), "group", 2, 1, 4, scales=torch.rand(4, 32), quant_mode=2,
            expert_scales=torch.rand(3, 2), global_bs=8, expert_token_nums_type=0,
        ),
    ),
)  # fmt: skip
def npu_moe_distribute_dispatch(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    scales: torch.Tensor | None = None,
    x_active_mask: torch.Tensor | None = None,
    expert_scales: torch.Tensor | None = None,
    group_tp: str = "",
    tp_world_size: int = 0,
    tp_rank_id: int = 0,
    expert_shard_type: int = 0,
    shared_expert_num: int = 1,
    shared_expert_rank_num: int = 0,
    quant_mode: int = 0,
    global_bs: int = 0,
    expert_token_nums_type: int = 1,
) -> Steps:
    """``(expand_x [A, h], dynamic_scales [A], expand_idx [tokens * k], expert_token_nums, ep_recv_counts, tp_recv_counts, ...)``.

    The last one is ``expand_scales`` [A], or empty. x: [tokens, h]; expert_ids: int32 [tokens, k]; A: the most rows that may
    come, tokens * ranks * min(k, experts of a rank).
    """
    experts = Experts(_NAME, group_ep, ep_world_size, ep_rank_id, moe_expert_num, global_bs)
    options = {
        "tp_world_size": tp_world_size, "expert_shard_type": expert_shard_type, "quant_mode": quant_mode,
        "shared_expert_rank_num": shared_expert_rank_num, "expert_token_nums_type": expert_token_nums_type,
    }  # fmt: skip
    _, (rows, *others) = yield from _dispatch(experts, x, expert_ids, scales, x_active_mask, expert_scales, options)
    return rows, others[0], ordinals(experts.masked(expert_ids, x_active_mask)), *others[1:]


@Operator(
    name="npu::npu_moe_distribute_dispatch_v2",
    source="operator documentation of torch_npu.npu_moe_distribute_dispatch_v2, and op-plugin's test of it",
    dtypes=(torch.float16, torch.bfloat16),
    examples=(
        lambda: call(torch.randn(3, 32).half(), _choices(), "group", 2, 0, 4, x_active_mask=torch.tensor([True, True, False])),
        lambda: call(
            torch.randn(3, 32).half(), _choices(), "group", 2, 1, 2, scales=torch.rand(2, 32), quant_mode=2, zero_expert_num=1,
            copy_expert_num=1,
        ),
        lambda: call(torch.randint(0, 99, (3, 32)).int(), _choices(), "group", 2, 1, 4, scales=torch.rand(3), tp_world_size=1),
    ),
)  # fmt: skip
def npu_moe_distribute_dispatch_v2(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    scales: torch.Tensor | None = None,
    x_active_mask: torch.Tensor | None = None,
    expert_scales: torch.Tensor | None = None,
    elastic_info: torch.Tensor | None = None,
    performance_info: torch.Tensor | None = None,
    group_tp: str = "",
    tp_world_size: int = 0,
    tp_rank_id: int = 0,
    expert_shard_type: int = 0,
    shared_expert_num: int = 1,
    shared_expert_rank_num: int = 0,
    quant_mode: int = 0,
    global_bs: int = 0,
    expert_token_nums_type: int = 1,
    comm_alg: str = "",
    zero_expert_num: int = 0,
    copy_expert_num: int = 0,
    const_expert_num: int = 0,
    y_dtype: int | None = None,
    x_dtype: int | None = None,
    scales_dtype: int | None = None,
) -> Steps:
    """As ``npu_moe_distribute_dispatch``, with ``assist_info_for_combine`` int32 [A * 128] as the third result."""
    for name, value in (
        ("elastic_info", elastic_info),
        ("y_dtype", y_dtype),
        ("x_dtype", x_dtype),
        ("scales_dtype", scales_dtype),
    ):
        if value is not None:
            raise unsupported(_V2, name, "a tensor" if isinstance(value, torch.Tensor) else value, "None")
    special = (zero_expert_num, copy_expert_num, const_expert_num)
    experts = Experts(_V2, group_ep, ep_world_size, ep_rank_id, moe_expert_num, global_bs, special)
    options = {
        "tp_world_size": tp_world_size, "expert_shard_type": expert_shard_type, "quant_mode": quant_mode,
        "shared_expert_rank_num": shared_expert_rank_num, "expert_token_nums_type": expert_token_nums_type,
    }  # fmt: skip
    found, (rows, *others) = yield from _dispatch(experts, x, expert_ids, scales, x_active_mask, expert_scales, options)
    size = max(expert_ids.numel(), rows.shape[0] * _SLOT)
    return rows, others[0], _assistance(found, size), *others[1:]
