"""Spellings of routers, which choose the experts of each token, and what nearly is one: as in `spellings.py`."""

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


ROUTERS: dict[Callable[..., Any], str] = {
    **dict.fromkeys(
        (router_of_qwen3, router_by_a_reciprocal, router_of_granite, router_that_gathers),
        "npu_moe_gating_top_k_softmax_v2 _to_copy",
    ),
    router_of_qwen2: "npu_moe_gating_top_k_softmax _to_copy",
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


def router_in_any_order(x: Any) -> Any:
    weights, experts = torch.softmax(x.float(), -1).topk(2, sorted=False)
    return weights.to(x.dtype), experts


def router_with_two_softmaxes(x: Any) -> Any:
    chosen, experts = torch.softmax(x.float(), -1).topk(2)
    return torch.softmax(chosen, -1).to(x.dtype), experts


def router_divided_over_tokens(x: Any) -> Any:
    weights, experts = torch.softmax(x.float(), -1).topk(2)
    return (weights / weights.sum(0, keepdim=True)).exp().to(x.dtype), experts.float()


def router_with_a_large_epsilon(x: Any) -> Any:
    weights, experts = torch.softmax(x.float(), -1).topk(2)
    return (weights / (weights.sum(-1, keepdim=True) + 0.01)).to(x.dtype), experts


NOT_ROUTERS: dict[Callable[..., Any], str] = {
    router_of_mixtral: "in float32", router_with_a_bias: "experts are ranked by", router_over_tokens: "",
    router_of_the_smallest: "not the largest", router_in_any_order: "any order", router_with_two_softmaxes: "one behind it",
    router_divided_over_tokens: "nothing would be saved", router_with_a_large_epsilon: "farther from float64",
}  # fmt: skip
