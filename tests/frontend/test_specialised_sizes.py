"""Inputs that share memory, whose symbolic sizes the program turns into numbers, are compiled; values are those of eager mode."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from device_helpers import NPU, compiled

Inputs = tuple[torch.Tensor, ...]


def _read_after_a_write(x: torch.Tensor, y: torch.Tensor) -> Inputs:
    x.add_(1)
    return (y + torch.ones(5, 8, device=NPU),)


def _both_written(x: torch.Tensor, y: torch.Tensor) -> Inputs:
    x.mul_(2)
    y.add_(x.view(5, 8))
    return x[1:], y * 3


def _matrix() -> torch.Tensor:
    return torch.arange(40.0, device=NPU).view(5, 8).clone()


PLACES: dict[str, Callable[[torch.Tensor], Inputs]] = {
    "all of it": lambda x: (x, x[:]),
    "the view first": lambda x: (x[:], x),
    "no view": lambda x: (x, x.detach()),
    "apart": lambda x: (x, x + 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("program", [_read_after_a_write, _both_written])
def test_inputs_in_one_memory(program: Callable[..., Inputs]) -> None:
    """A base and a view of it, in both orders, two tensors of one memory, and two that share none."""
    for place in PLACES.values():
        graph = compiled(program, dynamic=True)
        for _ in range(2):
            mine, twins = place(_matrix()), place(_matrix())
            with torch.no_grad():
                got, wanted = graph(*mine), program(*twins)
            for have, want in zip((*got, *mine), (*wanted, *twins), strict=True):
                assert torch.equal(have.cpu(), want.cpu())
