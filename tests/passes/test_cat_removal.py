"""Concatenations whose members are computed into their slices, and those that have to be left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from device_helpers import NPU, check, random
from reinplacing import operators, with_sum

aten = torch.ops.aten


@pytest.mark.slow
def test_concatenation_is_computed_in_place() -> None:
    """Members that only the concatenation uses are computed into their slices; others are copied."""

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.cat([x + 1, y, x * y])

    found = operators(function, random(4, 3), random(4, 3))
    assert "aten.cat.default" not in found
    assert found.count("aten.add.out") + found.count("aten.mul.out") == 2
    assert "aten.cat.default" in operators(function, random(4, 3), random(4, 3), remove_cat_ops=False)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: torch.cat([(x + 1).double(), y.double()]),
        lambda x, y: torch.cat([x + 1, (y * 2).half()]),
        lambda x, y: torch.cat([x + 1, y * 2], dim=1),
        lambda x, y: torch.cat([x + 1, y * 2], dim=-1).sum(),
        with_sum(lambda a, _: torch.cat([a, a])),
        with_sum(lambda a, y: (torch.cat([a, y * 2]), a)),
        lambda x, y: torch.cat([torch.empty(0, device=NPU), x + 1, y * 2]),
        lambda x, y: torch.cat([(x + 1)[:0], x + 1, y * 2]),
        lambda x, y: torch.cat([torch.cat([x + 1, y * 2]), x * y]),
        lambda x, _: torch.cat([x + 1]),
    ],
    ids=["double", "mixed", "dim 1", "last", "twice", "used elsewhere", "legacy empty", "empty", "nested", "one"],
)
def test_concatenations_are_right_or_left_alone(function: Callable[..., Any]) -> None:
    """Whatever the members and the dimension, values, strides and dtypes are eager's."""
    check(function, [(random(4, 3), random(4, 3)) for _ in range(3)])


def test_a_member_whose_out_form_runs_on_the_cpu_is_copied() -> None:
    """torch_npu has no kernel of `index.Tensor_out`: its fallback to the CPU cannot be captured."""

    def function(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return torch.cat([x[places], x[places + 1]]) * 2

    places = torch.tensor([1, 2], device=NPU)
    assert "aten.index.Tensor_out" not in operators(function, random(4, 3), places)
    check(function, [(random(4, 3), places) for _ in range(3)], require_capture=True)


def test_channels_last_concatenation() -> None:
    """Strides of a channels-last concatenation come out as in eager mode."""

    def make() -> torch.Tensor:
        return random(2, 3, 4, 4).to(memory_format=torch.channels_last)

    check(lambda x, y: torch.cat([x + 1, y * 2], dim=1), [(make(), make()) for _ in range(3)])
