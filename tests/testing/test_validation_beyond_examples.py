"""What a rule matches beyond its examples: other numbers of dimensions, and other numbers than those that it is traced with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from npugraph_ex.fusion.conditions import LikeExamples
from npugraph_ex.testing import Validation, validate_replacement

Function = Callable[..., Any]


def _validated(search: Function, replace: Function, *, examples: int = 10, **how: Any) -> Validation:
    x = torch.empty(4, 32, device="npu")
    return validate_replacement(search, replace, [x], max_examples=examples, dtypes=[torch.float32], **how)


def test_other_numbers_of_dimensions_are_tried() -> None:
    """The second dimension is the last one of the examples alone; the check that is named refuses the others.

    Where sizes differ, the shapes of the results do, and nothing fuses.
    """

    def search(x: torch.Tensor) -> torch.Tensor:
        return x.sum(1).relu()

    def replace(x: torch.Tensor) -> torch.Tensor:
        return x.sum(-1).clamp_min(0)

    result = _validated(search, replace, examples=30)
    assert result.verdict == "guard-too-weak", str(result)
    said = result.findings[0].text
    assert said.startswith("wrong where the number of dimensions of x is 3, right where it is 2;"), said
    assert "LikeExamples(x=...)" in said
    check = LikeExamples(x=torch.empty(4, 32, device="npu"))
    assert _validated(search, replace, examples=4, extra_check=check).verdict == "proven on 4"


def test_what_is_right_for_all_numbers_of_dimensions_is_proven() -> None:
    """Among the programs are some with one and with three."""
    result = _validated(lambda x: torch.softmax(x, -1) * 0.5, lambda x: 0.5 * x.softmax(-1))
    assert result.verdict == "proven on 10", str(result)


def _slope(x: torch.Tensor, s: float) -> torch.Tensor:
    return torch.nn.functional.leaky_relu(x, s) + 1


def _slope_below_one(x: torch.Tensor, s: float) -> torch.Tensor:
    return torch.maximum(x, x * s) + 1


def _bound(x: torch.Tensor, s: float) -> torch.Tensor:
    return torch.clamp_min(x, s).neg()


def _bound_from_zero(x: torch.Tensor, s: float) -> torch.Tensor:
    return torch.where(x > s, x, abs(s)).neg()


def _root(x: torch.Tensor, s: float) -> torch.Tensor:
    return (x.square() + s).rsqrt()


def _quotient(x: torch.Tensor, s: float) -> torch.Tensor:
    return 1 / (x * x + s).sqrt()


@pytest.mark.parametrize(
    ("search", "replace", "number", "verdict"),
    [
        (_slope, _slope_below_one, 0.01, "refuted"),
        (_bound, _bound_from_zero, 0.5, "refuted"),
        (_slope, lambda x, s: 1 + torch.nn.functional.leaky_relu(x, s), 0.01, "proven on 10"),
        (_root, _quotient, 1e-6, "proven on 10"),
    ],
    ids=["above one", "below zero", "any slope", "an epsilon"],
)
def test_other_numbers_are_tried(search: Function, replace: Function, number: float, verdict: str) -> None:
    """A numeric argument matches any number: larger ones, and unless it is an epsilon negative ones."""
    scalars: Mapping[str, float] = {"s": number}
    result = _validated(search, replace, scalar_workaround=scalars)
    assert result.verdict == verdict, str(result)
