"""Spellings of routers, which choose the experts of each token, and what nearly is one: as in `spelled_norms.py`."""

# The small undocumented functions are graphs to be traced; their names say what is in them.
# ruff: noqa: D103

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

ROUTER_SPECS = ((6, 16),)


def router_of_qwen3(x: Any) -> Any:
    scores = functional.softmax(x, dtype=torch.float, dim=-1)
    weights, experts = torch.topk(scores, 2, dim=-1)
    weights /= weights.sum(dim=-1, keepdim=True)
    return weights.to(x.dtype), experts


def router_by_a_reciprocal(x: Any) -> Any:
    weights, experts = functional.softmax(x.float(), dim=1).topk(2)
    return (weights * (1 / (weights.sum(-1).unsqueeze(-1) + 1e-20))).type_as(x), experts


def router_of_qwen2(x: Any) -> Any:
    weights, experts = torch.topk(functional.softmax(x, dim=1, dtype=torch.float), 3)
    return weights.type_as(x), experts


def router_by_exponentials(x: Any) -> Any:
    exponentials = torch.exp(x.float() - x.float().max(-1, keepdim=True)[0])
    weights, experts = torch.topk(exponentials / exponentials.sum(-1, keepdim=True), 3, -1)
    return weights.type_as(x), experts


def router_of_granite(x: Any) -> Any:
    chosen, experts = x.float().topk(2, dim=1)
    return torch.softmax(chosen, dim=1).type_as(x), experts


def router_that_gathers(x: Any) -> Any:
    experts = x.topk(2, dim=-1).indices
    weights = functional.softmax(x, dim=-1, dtype=torch.float).gather(-1, experts)
    return (weights / weights.sum(-1, keepdim=True)).to(x.dtype), experts


def router_with_wide_weights(x: Any) -> Any:
    """As models have it that compute the scores in float32, and round the weights."""
    weights, experts = torch.softmax(x.float() * 1.5, -1).topk(2)
    return (weights / weights.sum(-1, True)).to(x.dtype), experts


def router_in_any_order(x: Any) -> Any:
    weights, experts = torch.softmax(x.float(), -1).topk(2, sorted=False)
    return weights.to(x.dtype), experts


def router_by_a_sort(x: Any) -> Any:
    """The places alone are used, and do not leave."""
    scores = torch.softmax(x.float(), -1)
    experts = scores.argsort(-1, descending=True)[:, :2]
    weights = scores.gather(-1, experts)
    return (weights / weights.sum(-1, keepdim=True)).to(x.dtype) * x.gather(-1, experts)


ROUTERS: dict[Callable[..., Any], str] = {
    **dict.fromkeys(
        (router_of_qwen3, router_by_a_reciprocal, router_of_granite, router_that_gathers),
        "npu_moe_gating_top_k_softmax_v2 _to_copy",
    ),
    **dict.fromkeys(
        (router_of_qwen2, router_by_exponentials, router_in_any_order), "npu_moe_gating_top_k_softmax _to_copy"
    ),
    router_by_a_sort: "npu_moe_gating_top_k_softmax_v2 _to_copy gather mul",
    router_with_wide_weights: "_to_copy mul npu_moe_gating_top_k_softmax_v2 _to_copy _to_copy",
}


def router_of_mixtral(x: Any) -> Any:
    weights, experts = torch.topk(functional.softmax(x.float(), dim=-1), 2, dim=-1)
    return weights / weights.sum(dim=-1, keepdim=True), experts


def router_with_a_bias(x: Any) -> Any:
    """As DeepSeek-V3 chooses: by other numbers than it weighs with."""
    scores = torch.softmax(x.float(), -1)
    experts = (scores + scores.flip(0)).topk(2).indices
    weights = scores.gather(1, experts)
    return (weights / weights.sum(-1, keepdim=True)).to(x.dtype), experts


def router_over_tokens(x: Any) -> Any:
    weights, experts = torch.softmax(x.float(), 0).topk(2)
    return (weights / weights.sum(-1, keepdim=True)).to(x.dtype), experts


def router_of_the_smallest(x: Any) -> Any:
    weights, experts = torch.softmax(x.float(), -1).topk(2, largest=False)
    return weights.to(x.dtype), experts


def router_with_two_softmaxes(x: Any) -> Any:
    chosen, experts = torch.softmax(x.float(), -1).topk(2)
    return torch.softmax(chosen, -1).to(x.dtype), experts


def router_by_a_sort_that_leaves(x: Any) -> Any:
    """The parts of a sort have its strides, which a program can see."""
    weights, experts = torch.softmax(x.float(), -1).sort(-1, descending=True)
    weights, experts = weights[:, :2], experts[:, :2]
    return (weights / weights.sum(-1, keepdim=True)).to(x.dtype), experts


def router_that_sorts_all(x: Any) -> Any:
    weights, experts = torch.softmax(x.float(), -1).sort(-1, descending=True)
    return weights[:, :2].to(x.dtype), experts.float()


def router_divided_over_tokens(x: Any) -> Any:
    weights, experts = torch.softmax(x.float(), -1).topk(2)
    return (weights / weights.sum(0, keepdim=True)).exp().to(x.dtype), experts.float()


def router_with_a_large_epsilon(x: Any) -> Any:
    weights, experts = torch.softmax(x.float(), -1).topk(2)
    return (weights / (weights.sum(-1, keepdim=True) + 0.01)).to(x.dtype), experts


def router_of_deepseek_v2(x: Any) -> Any:
    """A softmax, of which the best groups stay."""
    scores = torch.softmax(x.float(), -1)
    groups = scores.view(-1, 4, 4).amax(-1)
    mask = torch.zeros_like(groups).scatter_(1, groups.topk(2, dim=-1, sorted=False)[1], 1).repeat_interleave(4, 1)
    weights, experts = scores.masked_fill(~mask.bool(), 0.0).topk(2, dim=-1)
    return weights * 16, experts


def router_of_switch_transformers(x: Any) -> Any:
    weights, experts = torch.softmax(x, dim=-1, dtype=torch.float32).max(dim=-1)
    return weights.to(x.dtype), experts


NOT_ROUTERS: dict[Callable[..., Any], str] = {
    router_of_mixtral: "in float32", router_with_a_bias: "experts are ranked by", router_over_tokens: "",
    router_of_the_smallest: "not the largest", router_with_two_softmaxes: "one behind it",
    router_of_deepseek_v2: "a mask hides some weights", router_of_switch_transformers: "taken by max",
    router_by_a_sort_that_leaves: "take the largest by topk", router_that_sorts_all: "the places of all experts are used",
    router_divided_over_tokens: "nothing would be saved", router_with_a_large_epsilon: "farther from float64",
}  # fmt: skip


def _of_groups(choice: Any, groups: Any, fill: float = -torch.inf, kept: int = 2) -> Any:
    """The choice where it lies in the groups that are kept."""
    best = groups.topk(kept, dim=-1, sorted=False)[1]
    mask = torch.zeros_like(groups).scatter_(1, best, 1).unsqueeze(-1).expand(-1, 4, 4).reshape(-1, 16)
    return choice.masked_fill(~mask.bool(), fill)


def _shares(scores: Any, ranked: Any, factor: float = 1.0) -> Any:
    experts = ranked.topk(3, dim=-1, sorted=False)[1]
    weights = scores.gather(1, experts)
    shares = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return (shares if factor == 1.0 else shares * factor), experts


def router_of_deepseek(x: Any, bias: Any) -> Any:
    scores = x.float().sigmoid()
    choice = scores + bias
    groups = choice.view(-1, 4, 4).topk(2, dim=-1)[0].sum(dim=-1)
    return _shares(scores, _of_groups(choice, groups), 2.5)


def router_by_the_best_of_each_group(x: Any, bias: Any) -> Any:
    scores = torch.sigmoid(x.float())
    choice = bias.float() + scores
    best = choice.view(-1, 4, 4).amax(-1).topk(1).indices
    allowed = torch.zeros(len(x), 4, dtype=torch.bool, device=x.device).scatter_(1, best, value=True)
    ranked = torch.where(allowed.repeat_interleave(4, dim=1), choice, -torch.inf)
    weights, experts = _shares(scores, ranked)
    return weights.to(x.dtype), experts


def router_with_a_bias_alone(x: Any, bias: Any) -> Any:
    """As MiniMax M2 has it."""
    scores = x.float().sigmoid()
    experts = (scores + bias).topk(3, dim=-1, sorted=False)[1]
    weights = scores.gather(1, experts)
    return weights / weights.sum(dim=-1, keepdim=True), experts


def router_of_sigmoids(x: Any, bias: Any) -> Any:
    del bias
    weights, experts = x.float().sigmoid().topk(3)
    return (weights * (0.5 / (weights.sum(-1, keepdim=True) + 0.01))).to(x.dtype), experts


SIGMOID_SPECS = ((6, 16), (16,))
SIGMOID_ROUTERS: dict[Callable[..., Any], str] = {
    **dict.fromkeys((router_of_deepseek, router_with_a_bias_alone), "_to_copy _to_copy npu_moe_gating_top_k _to_copy"),
    router_by_the_best_of_each_group: "npu_moe_gating_top_k _to_copy",
    router_of_sigmoids: "npu_moe_gating_top_k _to_copy",
}


def zeros_for_other_groups(x: Any, bias: Any) -> Any:
    """A choice below zero loses against an expert of another group."""
    scores = x.float().sigmoid()
    choice = scores + bias
    return _shares(scores, _of_groups(choice, choice.view(-1, 4, 4).topk(2, dim=-1)[0].sum(dim=-1), fill=0.0))


def zeros_by_a_choice(x: Any, bias: Any) -> Any:
    """As above; the zero is a tensor in the graph, and a constant after lifting."""
    scores = x.float().sigmoid()
    choice = scores + bias
    kept = _of_groups(choice, choice.view(-1, 4, 4).amax(-1)) > -torch.inf
    return _shares(scores, torch.where(kept, choice, 0.0))


def worst_groups(x: Any, bias: Any) -> Any:
    scores = x.float().sigmoid()
    choice = scores + bias
    return _shares(scores, _of_groups(choice, -choice.view(-1, 4, 4).amax(-1)))


def smallest_groups(x: Any, bias: Any) -> Any:
    scores = x.float().sigmoid()
    choice = scores + bias
    best = choice.view(-1, 4, 4).amax(-1)
    kept = torch.zeros_like(best).scatter_(1, best.topk(2, largest=False)[1], 1).bool().repeat_interleave(4, 1)
    return _shares(scores, choice.masked_fill(~kept, -torch.inf))


def groups_by_three(x: Any, bias: Any) -> Any:
    scores = x.float().sigmoid()
    choice = scores + bias
    return _shares(scores, _of_groups(choice, choice.view(-1, 4, 4).topk(3, dim=-1)[0].sum(dim=-1)))


def groups_of_every_fourth(x: Any, bias: Any) -> Any:
    """Groups are sums of neighbours, and the mask is of every fourth expert."""
    scores = x.float().sigmoid()
    choice = scores + bias
    groups = choice.view(-1, 4, 4).amax(-1)
    mask = torch.zeros_like(groups).scatter_(1, groups.topk(2)[1], 1).unsqueeze(1).expand(-1, 4, 4).reshape(-1, 16)
    return _shares(scores, choice.masked_fill(mask == 0, -torch.inf))


def too_many_of_a_group(x: Any, bias: Any) -> Any:
    scores = x.float().sigmoid()
    choice = scores + bias
    experts = _of_groups(choice, choice.view(-1, 4, 4).amax(-1), kept=1).topk(5)[1]
    weights = scores.gather(1, experts)
    return weights / weights.sum(dim=-1, keepdim=True), experts


def bias_of_each_token(x: Any, bias: Any) -> Any:
    wide = x.float()
    scores = wide.sigmoid()
    return _shares(scores, scores + bias * wide)


def bias_times_the_score(x: Any, bias: Any) -> Any:
    scores = x.float().sigmoid()
    return _shares(scores, scores * bias)


def biased_weights(x: Any, bias: Any) -> Any:
    choice = x.float().sigmoid() + bias
    return _shares(choice, choice)


def sigmoids_that_are_not_divided(x: Any, bias: Any) -> Any:
    scores = x.float().sigmoid()
    experts = (scores + bias).topk(3)[1]
    return scores.gather(1, experts) * 2.5, experts


NOT_SIGMOID_ROUTERS: dict[Callable[..., Any], str] = {
    zeros_for_other_groups: "other groups have 0.0", worst_groups: "no choice of groups", groups_by_three: "no choice of groups",
    smallest_groups: "groups that stay are not the best",
    groups_of_every_fourth: "where float64 and eager mode are not", too_many_of_a_group: "5 are chosen in 1 of 4 groups",
    bias_of_each_token: "the bias is", bias_times_the_score: "no sum of the sigmoid", biased_weights: "",
    sigmoids_that_are_not_divided: "",
}  # fmt: skip
