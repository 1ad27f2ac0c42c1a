"""Reinplacing where an operator is given its destination a second time, inside a list: what it still reads must stay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from device_helpers import NPU, check, through_aot


def into_an_intermediate(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The indices are the tensor that is written."""
    places = x + 1
    return torch.index_put(places, (places,), values)


def into_an_input(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The same, and the result overwrites it."""
    x.copy_(torch.index_put(x, (x,), values))
    return values * 2


@pytest.mark.parametrize("function", [into_an_intermediate, into_an_input])
def test_indices_are_not_overwritten(function: Callable[..., torch.Tensor]) -> None:
    """A kernel that writes while it reads its indices there would write anywhere; torch's own refuses."""

    def arguments() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor([2, -1, 1, 0], device=NPU), torch.arange(10, 14, device=NPU)

    check(function, [arguments() for _ in range(3)])
    assert "aten.index_put_.default" not in through_aot(function, *arguments())[1]


def test_other_indices_do_not_keep_it_from_working_in_place() -> None:
    """Only the destination itself among the indices does."""

    def function(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return torch.index_put(x + 1, (places,), x)

    arguments = torch.tensor([2, -1, 1, 0], device=NPU), torch.tensor([1, 0, 3, 2], device=NPU)
    check(function, [arguments] * 3)
    assert "aten.index_put_.default" in through_aot(function, *arguments)[1]
