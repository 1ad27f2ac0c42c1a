"""Brings the experts' results back to the ranks that sent the tokens, and adds up each token's, weighted.

Formula (operator documentation of ``torch_npu.npu_moe_distribute_combine`` and its other forms)::

    out[t] = sum over t's choices j of expert_scales[t, j] * result[t, j] + shared_expert_x[t]

    zero expert:      result = 0
    copy expert:      result = ori_x[t]
    constant expert:  result = const_expert_alpha_1 * ori_x[t] + const_expert_alpha_2 * const_expert_v
    any other one:    result = the row of expand_x that belongs to the choice, from the expert's rank

    npu_moe_distribute_combine_add_rms_norm:
    x = out + residual_x;  rstd = 1 / sqrt(mean(x^2) + norm_eps);  y = x * rstd * gamma

The sum is float32 and goes by choices. The rows, counts and ``expand_idx`` or ``assist_info_for_combine`` are those of the dispatch
that sent the tokens. A choice that ``x_active_mask`` leaves out adds nothing; the device leaves the row of a token without active
choices unwritten, which is zeros here.

Not covered: shared experts on ranks of their own, a second group (``tp_world_size`` 2), quantised communication
(``comm_quant_mode``), ``elastic_info``, int32 rows; ``performance_info`` stays as it is.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from npugraph_ex.operators._distribution import Experts, stacked
from npugraph_ex.operators._precision import compute_dtype, refused, unsupported
from npugraph_ex.operators._ranks import Ranks, Steps
from npugraph_ex.operators._record import Operator, call
from npugraph_ex.operators.npu_rms_norm import normalise

_NAME, _V2, _NORM = (
    "npu_moe_distribute_combine",
    "npu_moe_distribute_combine_v2",
    "npu_moe_distribute_combine_add_rms_norm",
)


class _Special(NamedTuple):
    """What the experts that compute on no rank need."""

    ori_x: torch.Tensor | None = None
    alpha_1: torch.Tensor | None = None
    alpha_2: torch.Tensor | None = None
    v: torch.Tensor | None = None


def _refuse_uncovered(name: str, comm_quant_mode: int, **tensors: torch.Tensor | None) -> None:
    if comm_quant_mode != 0:
        raise unsupported(name, "comm_quant_mode", comm_quant_mode, "0")
    for argument, value in tensors.items():
        if value is not None:
            raise unsupported(name, argument, "a tensor", "None")


def _check(
    experts: Experts, expand_x: torch.Tensor, expert_ids: torch.Tensor, expert_scales: torch.Tensor, special: _Special
) -> None:
    """Raise for tensors that do not fit."""
    if expand_x.dim() != 2 or not expand_x.is_floating_point():
        raise refused(experts.name, "expand_x", (tuple(expand_x.shape), expand_x.dtype), "float16 or bfloat16 [A, h]")
    if expert_scales.shape != expert_ids.shape:
        raise refused(
            experts.name, "expert_scales", expert_scales.shape, f"one for each choice, {tuple(expert_ids.shape)}"
        )
    rows = experts.tokens(expert_ids.shape[0]) * experts.ranks * min(experts.local, expert_ids.shape[1])
    if expand_x.shape[0] < rows:
        raise refused(experts.name, "the rows of expand_x", expand_x.shape[0], f"at least {rows}, as many as may come")
    _, copies, constants = experts.special
    if (copies or constants) and (
        special.ori_x is None or special.ori_x.shape != (expert_ids.shape[0], expand_x.shape[1])
    ):
        raise refused(
            experts.name,
            "ori_x",
            None if special.ori_x is None else special.ori_x.shape,
            "the tokens, where there are copy or constant experts",
        )
    if constants and any(value is None or value.shape != (constants, expand_x.shape[1]) for value in special[1:]):
        wanted = f"[{constants}, {expand_x.shape[1]}]"
        raise refused(experts.name, "const_expert_alpha_1, ..._2 and const_expert_v", "None or of other shapes", wanted)


def _by_assistance(experts: Experts, everyone: Ranks, expert_ids: torch.Tensor) -> torch.Tensor:
    """The experts' results [tokens, k, h], each row at the choice that came along with it."""
    h = everyone.parts[0][0].shape[1]
    out = everyone.parts[0][0].new_zeros(*expert_ids.shape, h)
    for rows, places, ends in everyone.parts:
        mine = places[: int(ends[-1])].long()
        back = (mine[:, 0] == experts.rank).nonzero().flatten()
        out[mine[back, 1], mine[back, 2]] = rows[back]
    return out


def _by_ordinal(experts: Experts, everyone: Ranks, expert_ids: torch.Tensor, expand_idx: torch.Tensor) -> torch.Tensor:
    """The experts' results [tokens, k, h], each choice's counted from where the rows of its expert and its sender begin."""
    ends = stacked(everyone, 1).long()
    starts = torch.nn.functional.pad(ends, (1, -1)).view(experts.ranks, experts.local, experts.ranks)[
        :, :, experts.rank
    ]
    here = (expert_ids >= 0) & (expert_ids < experts.number)
    chosen = torch.where(here, expert_ids, 0).long()
    owner = chosen // experts.local
    row = torch.where(here, starts[owner, chosen % experts.local] + expand_idx.view_as(chosen), 0)
    return stacked(everyone, 0)[owner, row] * here.unsqueeze(-1)


def _added(
    experts: Experts,
    results: torch.Tensor,
    chosen: torch.Tensor,
    expert_scales: torch.Tensor,
    special: _Special,
    shared: torch.Tensor | None = None,
) -> torch.Tensor:
    """``out`` [tokens, h], not rounded."""
    wide = compute_dtype(results)
    out = results.new_zeros(results.shape[0], results.shape[2], dtype=wide)
    zeros, copies, constants = experts.special
    for j in range(chosen.shape[1]):
        value, expert = results[:, j].to(wide), chosen[:, j] - experts.number - zeros
        if (copies or constants) and special.ori_x is not None:
            original = special.ori_x.to(wide)
            value = torch.where(((expert >= 0) & (expert < copies)).unsqueeze(1), original, value)
            place = expert - copies
            if constants and special.alpha_1 is not None and special.alpha_2 is not None and special.v is not None:
                at = place.clamp(0, constants - 1).long()
                constant = special.alpha_1[at].to(wide) * original + special.alpha_2[at].to(wide) * special.v[at].to(
                    wide
                )
                value = torch.where(((place >= 0) & (place < constants)).unsqueeze(1), constant, value)
        out = out + expert_scales[:, j : j + 1].to(wide) * value
    return out if shared is None else out + shared.reshape(out.shape).to(wide)


def _assisted(
    experts: Experts,
    expand_x: torch.Tensor,
    expert_ids: torch.Tensor,
    assistance: torch.Tensor,
    ends: torch.Tensor,
    expert_scales: torch.Tensor,
    mask: torch.Tensor | None,
    special: _Special,
    shared: torch.Tensor | None,
    options: tuple[int, int, int],
) -> Steps:
    """``out``, not rounded, where each row came with its sender, token and choice."""
    ranks_of_shared, tp_world_size, shard_type = options
    experts.check(
        expert_ids,
        expand_x.shape[-1],
        shared_expert_rank_num=ranks_of_shared,
        tp_world_size=tp_world_size,
        expert_shard_type=shard_type,
    )
    _check(experts, expand_x, expert_ids, expert_scales, special)
    rows = expand_x.shape[0]
    if assistance.dim() != 1 or assistance.shape[0] < 3 * rows:
        raise refused(
            experts.name, "assist_info_for_combine", assistance.shape, f"that of the dispatch, [{128 * rows}]"
        )
    if ends.shape[0] < experts.local * experts.ranks:
        raise refused(
            experts.name,
            "ep_send_counts",
            ends.shape,
            f"the dispatch's ep_recv_counts, [{experts.local * experts.ranks}]",
        )
    if shared is not None and shared.numel() != expert_ids.shape[0] * expand_x.shape[1]:
        raise refused(experts.name, "shared_expert_x", shared.shape, f"[{expert_ids.shape[0]}, {expand_x.shape[1]}]")
    everyone = yield experts.exchange(
        expand_x, assistance[: 3 * rows].view(rows, 3), ends[: experts.local * experts.ranks]
    )
    experts.check_values(expert_ids, mask)
    results = _by_assistance(experts, everyone, expert_ids)
    chosen = experts.masked(expert_ids, mask)
    return _added(experts, torch.where((chosen >= 0).unsqueeze(-1), results, 0), chosen, expert_scales, special, shared)


def _choices() -> torch.Tensor:
    return torch.tensor([[0, 3], [2, 1], [3, 2]], dtype=torch.int32)


def _places() -> torch.Tensor:
    """Of six rows, each of another choice of rank 0."""
    places = torch.zeros(12 * 128, dtype=torch.int32)
    places[:18] = torch.tensor([[0, row // 2, row % 2] for row in range(6)]).flatten()
    return places


def _counts() -> torch.Tensor:
    return torch.tensor([2, 3, 5, 6], dtype=torch.int32)


@Operator(
    name="npu::npu_moe_distribute_combine",
    source="operator documentation of torch_npu.npu_moe_distribute_combine",
    dtypes=(torch.float16, torch.bfloat16),
    examples=(
        lambda: call(
            torch.randn(12, 32).half(), _choices(), torch.tensor([0, 0, 0, 0, 1, 1]).int(), _counts(), torch.rand(3, 2), "group", 2,
            0, 4, expand_scales=torch.rand(12),
        ),
    ),
)  # fmt: skip
def npu_moe_distribute_combine(
    expand_x: torch.Tensor,
    expert_ids: torch.Tensor,
    expand_idx: torch.Tensor,
    ep_send_counts: torch.Tensor,
    expert_scales: torch.Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    tp_send_counts: torch.Tensor | None = None,
    x_active_mask: torch.Tensor | None = None,
    activation_scale: torch.Tensor | None = None,
    weight_scale: torch.Tensor | None = None,
    group_list: torch.Tensor | None = None,
    expand_scales: torch.Tensor | None = None,
    shared_expert_x: torch.Tensor | None = None,
    group_tp: str = "",
    tp_world_size: int = 0,
    tp_rank_id: int = 0,
    expert_shard_type: int = 0,
    shared_expert_num: int = 1,
    shared_expert_rank_num: int = 0,
    global_bs: int = 0,
    out_dtype: int = 0,
    comm_quant_mode: int = 0,
    group_list_type: int = 0,
) -> Steps:
    """[tokens, h]. expand_x: [A, h]; expert_ids: int32 [tokens, k]; expert_scales: float32 [tokens, k]."""
    _refuse_uncovered(
        _NAME, comm_quant_mode, activation_scale=activation_scale, weight_scale=weight_scale, group_list=group_list
    )
    experts = Experts(_NAME, group_ep, ep_world_size, ep_rank_id, moe_expert_num, global_bs)
    experts.check(
        expert_ids, expand_x.shape[-1], shared_expert_rank_num=shared_expert_rank_num, tp_world_size=tp_world_size,
        expert_shard_type=expert_shard_type,
    )  # fmt: skip
    _check(experts, expand_x, expert_ids, expert_scales, _Special())
    size = experts.local * experts.ranks
    if expand_idx.numel() != expert_ids.numel() or ep_send_counts.numel() < size:
        raise refused(_NAME, "expand_idx and ep_send_counts", (tuple(expand_idx.shape), tuple(ep_send_counts.shape)),
                      f"those of the dispatch, [{expert_ids.numel()}] and [{size}]")  # fmt: skip
    everyone = yield experts.exchange(expand_x, ep_send_counts[:size])
    experts.check_values(expert_ids, x_active_mask)
    chosen = experts.masked(expert_ids, x_active_mask)
    results = _by_ordinal(experts, everyone, chosen, expand_idx)
    return _added(experts, results, chosen, expert_scales, _Special(), shared_expert_x).to(expand_x.dtype)


@Operator(
    name="npu::npu_moe_distribute_combine_v2",
    source="operator documentation of torch_npu.npu_moe_distribute_combine_v2",
    dtypes=(torch.float16, torch.bfloat16),
    examples=(
        lambda: call(torch.randn(12, 32).half(), _choices(), _places(), _counts(), torch.rand(3, 2), "group", 2, 0, 4),
        lambda: call(
            torch.randn(12, 32).half(), _choices() + 1, _places(), _counts(), torch.rand(3, 2), "group", 2, 0, 2, global_bs=12,
            zero_expert_num=1, copy_expert_num=1, const_expert_num=1, ori_x=torch.randn(3, 32).half(),
            const_expert_alpha_1=torch.randn(1, 32).half(), const_expert_alpha_2=torch.randn(1, 32).half(),
            const_expert_v=torch.randn(1, 32).half(),
        ),
    ),
)  # fmt: skip
def npu_moe_distribute_combine_v2(
    expand_x: torch.Tensor,
    expert_ids: torch.Tensor,
    assist_info_for_combine: torch.Tensor,
    ep_send_counts: torch.Tensor,
    expert_scales: torch.Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    tp_send_counts: torch.Tensor | None = None,
    x_active_mask: torch.Tensor | None = None,
    expand_scales: torch.Tensor | None = None,
    shared_expert_x: torch.Tensor | None = None,
    elastic_info: torch.Tensor | None = None,
    ori_x: torch.Tensor | None = None,
    const_expert_alpha_1: torch.Tensor | None = None,
    const_expert_alpha_2: torch.Tensor | None = None,
    const_expert_v: torch.Tensor | None = None,
    performance_info: torch.Tensor | None = None,
    group_tp: str = "",
    tp_world_size: int = 0,
    tp_rank_id: int = 0,
    expert_shard_type: int = 0,
    shared_expert_num: int = 1,
    shared_expert_rank_num: int = 0,
    global_bs: int = 0,
    comm_quant_mode: int = 0,
    comm_alg: str = "",
    zero_expert_num: int = 0,
    copy_expert_num: int = 0,
    const_expert_num: int = 0,
) -> Steps:
    """[tokens, h]. expand_x: [A, h]; expert_ids: int32 [tokens, k]; expert_scales: float32 [tokens, k]; ori_x: [tokens, h]."""
    _refuse_uncovered(_V2, comm_quant_mode, elastic_info=elastic_info)
    kinds = (zero_expert_num, copy_expert_num, const_expert_num)
    experts = Experts(_V2, group_ep, ep_world_size, ep_rank_id, moe_expert_num, global_bs, kinds)
    special = _Special(ori_x, const_expert_alpha_1, const_expert_alpha_2, const_expert_v)
    out = yield from _assisted(
        experts, expand_x, expert_ids, assist_info_for_combine, ep_send_counts, expert_scales, x_active_mask, special,
        shared_expert_x, (shared_expert_rank_num, tp_world_size, expert_shard_type),
    )  # fmt: skip
    return out.to(expand_x.dtype)


@Operator(
    name="npu::npu_moe_distribute_combine_add_rms_norm",
    source="operator documentation of torch_npu.npu_moe_distribute_combine_add_rms_norm",
    dtypes=(torch.float16, torch.bfloat16),
    examples=(
        lambda: call(
            torch.randn(12, 32).half(), _choices(), _places(), _counts(), torch.rand(3, 2), torch.randn(3, 1, 32).half(),
            torch.randn(32).half(), "group", 2, 0, 4, norm_eps=1e-5,
        ),
    ),
)  # fmt: skip
def npu_moe_distribute_combine_add_rms_norm(
    expand_x: torch.Tensor,
    expert_ids: torch.Tensor,
    expand_idx: torch.Tensor,
    ep_send_counts: torch.Tensor,
    expert_scales: torch.Tensor,
    residual_x: torch.Tensor,
    gamma: torch.Tensor,
    group_ep: str,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    tp_send_counts: torch.Tensor | None = None,
    x_active_mask: torch.Tensor | None = None,
    activation_scale: torch.Tensor | None = None,
    weight_scale: torch.Tensor | None = None,
    group_list: torch.Tensor | None = None,
    expand_scales: torch.Tensor | None = None,
    shared_expert_x: torch.Tensor | None = None,
    elastic_info: torch.Tensor | None = None,
    ori_x: torch.Tensor | None = None,
    const_expert_alpha_1: torch.Tensor | None = None,
    const_expert_alpha_2: torch.Tensor | None = None,
    const_expert_v: torch.Tensor | None = None,
    group_tp: str = "",
    tp_world_size: int = 0,
    tp_rank_id: int = 0,
    expert_shard_type: int = 0,
    shared_expert_num: int = 1,
    shared_expert_rank_num: int = 0,
    global_bs: int = 0,
    out_dtype: int = 0,
    comm_quant_mode: int = 0,
    group_list_type: int = 0,
    comm_alg: str = "",
    norm_eps: float = 1e-6,
    zero_expert_num: int = 0,
    copy_expert_num: int = 0,
    const_expert_num: int = 0,
) -> Steps:
    """``(y [tokens, 1, h], rstd float32 [tokens, 1, 1], x [tokens, 1, h])``; residual_x: like x; gamma: [h]; the rest as v2."""
    _refuse_uncovered(
        _NORM, comm_quant_mode, activation_scale=activation_scale, weight_scale=weight_scale, group_list=group_list,
        elastic_info=elastic_info,
    )  # fmt: skip
    shape = (expert_ids.shape[0], 1, expand_x.shape[-1])
    if residual_x.shape != shape or gamma.shape != shape[2:]:
        raise refused(
            _NORM, "residual_x and gamma", (tuple(residual_x.shape), tuple(gamma.shape)), f"{shape} and {shape[2:]}"
        )
    kinds = (zero_expert_num, copy_expert_num, const_expert_num)
    experts = Experts(_NORM, group_ep, ep_world_size, ep_rank_id, moe_expert_num, global_bs, kinds)
    special = _Special(ori_x, const_expert_alpha_1, const_expert_alpha_2, const_expert_v)
    out = yield from _assisted(
        experts, expand_x, expert_ids, expand_idx, ep_send_counts, expert_scales, x_active_mask, special, shared_expert_x,
        (shared_expert_rank_num, tp_world_size, expert_shard_type),
    )  # fmt: skip
    x = out.view(shape) + residual_x.to(out.dtype)
    y, rstd = normalise(x, gamma, norm_eps, out.dtype)
    return y.to(expand_x.dtype), rstd, x.to(expand_x.dtype)
