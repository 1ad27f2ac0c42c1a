"""Softmaxes that are spelled out, and what nearly is one: functions by name, that take ``ACTIVATION_SPECS``."""

# The small undocumented functions are graphs to be traced; their names say what is in them.
# ruff: noqa: D103

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def by_exponentials(x: Any) -> Any:
    weights = torch.exp(x - x.amax(-1, keepdim=True))
    return weights / weights.sum(-1, keepdim=True)


def over_another_dimension(x: Any) -> Any:
    weights = (x - x.max(1)[0].unsqueeze(1)).exp()
    return weights * (1 / weights.sum(1).unsqueeze(1))


def in_float32(x: Any) -> Any:
    wide = x.float()
    weights = torch.exp(wide - wide.max(dim=-1, keepdim=True).values)
    return (weights / weights.sum(dim=-1, keepdim=True)).to(x.dtype)


def by_a_logarithm(x: Any) -> Any:
    return torch.log_softmax(x, 1).exp()


SOFTMAXES = (by_exponentials, over_another_dimension, in_float32, by_a_logarithm)


def without_the_largest(x: Any) -> Any:
    weights = x.exp()
    return weights / weights.sum(-1, keepdim=True)


def largest_of_another_dimension(x: Any) -> Any:
    weights = torch.exp(x - x.amax(1, keepdim=True))
    return weights / weights.sum(-1, keepdim=True)


def largest_of_all(x: Any) -> Any:
    weights = torch.exp(x - x.max())
    return weights / weights.sum(-1, keepdim=True)


def sum_of_others(x: Any) -> Any:
    weights = torch.exp(x - x.amax(-1, keepdim=True))
    return weights / (weights + 1).sum(-1, keepdim=True)


def divided_behind_values(x: Any) -> Any:
    """As streaming attention does it."""
    weights = torch.exp(x - x.amax(-1, keepdim=True))
    return weights @ x.mT / weights.sum(-1, keepdim=True)


def with_a_number_in_the_sum(x: Any) -> Any:
    weights = torch.exp(x - x.amax(-1, keepdim=True))
    return weights / (weights.sum(-1, keepdim=True) + 1e-9)


NOT_SOFTMAXES: dict[Callable[..., Any], str] = {
    with_a_number_in_the_sum: "1e-09 is added to the sum",
    without_the_largest: "nothing is taken from the exponents", sum_of_others: "",
    largest_of_another_dimension: "is not the largest element of what is added up",
    largest_of_all: "is not the largest element of what is added up",
    divided_behind_values: "divided by their sum behind their product with values",
}  # fmt: skip
