"""What is a view to autograd among the results is what eager mode gives, whatever the passes put in its place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from device_helpers import compiled, random

Program = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]


def _clone_of_a_view(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return ((x.unsqueeze(1) + 2).squeeze(1).clone(),)


def _sum_with_a_view(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return ((x.unsqueeze(1) + 2).squeeze(1) * 3,)


def _given_back_twice(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = (x.unsqueeze(1) + 2).squeeze(1) * 3
    return y, y


def _with_its_own_view(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = (x.unsqueeze(1) + 2).squeeze(1).clone()
    return y, y[1:]


def _written_back(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    x.unsqueeze(1).add_(2)
    y = x.clone()
    x.copy_(y)
    return (y,)


def _written_through_a_view(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y, z = x + 1, x.view(2, -1) * 2
    y.view(2, -1)[1:].add_(1)
    z.t().tril_()
    return y, z, z[0], z.view(-1)


def _written_through_an_alias(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x.clone()
    z = torch.ops.aten.alias.default(y)
    z.add_(x)
    return y, z, y.unsqueeze(0).transpose(0, 1)


def _read_before_it_is_returned(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x + 1
    y.view(-1)[1:].mul_(2)
    part = y[1:]
    return part * 3, part, y, y.t(), part.t()


@pytest.mark.parametrize("force_eager", [False, True], ids=["captured", "uncaptured"])
@pytest.mark.parametrize(
    "program",
    [
        _clone_of_a_view,
        _sum_with_a_view,
        _given_back_twice,
        _with_its_own_view,
        _written_back,
        _written_through_a_view,
        _written_through_an_alias,
        _read_before_it_is_returned,
    ],
)
def test_results_are_views_where_eager_gives_views(program: Program, force_eager: bool) -> None:
    """Of which result a result is a view, which share memory, and their values; `detach_` works on those that are no views."""
    graph = compiled(program, force_eager=force_eager)
    for _ in range(3):
        x = random(4)
        twin = x.clone()
        wanted, got = program(twin), graph(x)
        assert _bases(x, *got) == _bases(twin, *wanted)
        assert _shared(got) == _shared(wanted)
        for have, want in zip((*got, x), (*wanted, twin), strict=True):
            assert torch.equal(have.cpu(), want.cpu())
        for result in got:
            if not result._is_view():
                result.detach_()


def _bases(*tensors: torch.Tensor) -> list[str | int]:
    """For each tensor the position of the one of which it is a view to autograd, or where that is not among them."""
    places = {id(tensor): position for position, tensor in enumerate(tensors)}
    bases = [tensor._base for tensor in tensors]
    return ["no view" if base is None else places.get(id(base), "another's view") for base in bases]


def _shared(results: tuple[Any, ...]) -> list[bool]:
    first = results[0].untyped_storage().data_ptr()
    return [result.untyped_storage().data_ptr() == first for result in results]
