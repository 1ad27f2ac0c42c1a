"""A program that writes an input which needs gradients, and returns what it wrote into another one, has all its results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import permutations

import pytest
import torch
import torch.nn.functional as F
from device_helpers import NPU, compiled
from torch import nn

Write = Callable[[torch.Tensor], object]
Back = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def _gradients() -> Iterator[None]:
    with torch.enable_grad():
        yield


WRITES: dict[str, Write] = {
    "relu_": lambda x: x.relu_(),
    "a row": lambda x: x[0].mul_(2),
    "data": lambda x: x.data.mul_(2),
    "detached": lambda x: x.detach().add_(1),
    "none": lambda x: x.sum(),
}
BACK: dict[str, Back] = {
    "add_": lambda count: count.add_(1),
    "out": lambda count: torch.mul(count, 3, out=count),
    "without gradients": torch.no_grad()(lambda count: count.mul_(2)),
    "twice": lambda count: count.add_(1).neg_(),
    "a view": lambda count: count.add_(1)[1:],
}


@pytest.mark.parametrize("order", permutations(range(3)), ids=str)
@pytest.mark.parametrize("back", BACK)
@pytest.mark.parametrize("write", WRITES)
def test_all_results_are_there(write: str, back: str, order: tuple[int, ...]) -> None:
    """Values, which results are the inputs themselves, what was written, and gradients are those of eager mode."""

    def function(x: torch.Tensor, count: torch.Tensor, other: torch.Tensor) -> list[torch.Tensor]:
        WRITES[write](x)
        results = [x * 2, BACK[back](count), other.add_(3)]
        return [results[place] for place in order]

    graph, found = compiled(function), []
    for called in (function, graph, graph):
        x = torch.linspace(-1, 1, 6, device=NPU).view(2, 3).requires_grad_()
        inputs = x * 1, torch.ones(4, device=NPU), torch.ones(5, device=NPU)
        results = called(*inputs)
        sum(result.sum() for result in results if result.requires_grad).backward()
        own = [[result is given for given in inputs] for result in results]
        found.append((own, [value.tolist() for value in (*results, *inputs, x.grad)]))
    assert found[1] == found[0]
    assert found[2] == found[0]


def test_a_limited_embedding_beside_a_spectral_norm() -> None:
    """Both write in the forward: the embedding its weight, the norm two buffers, which it keeps as what `normalize` gave back."""
    found = []
    for called in (nn.Module.train, compiled):
        torch.manual_seed(0)
        norm = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        model = nn.Sequential(nn.Embedding(10, 8, max_norm=1.0), norm).to(NPU)
        function = called(model)
        for _ in range(3):
            function(torch.arange(10, device=NPU).view(5, 2)).square().sum().backward()
        found.append([value.clone() for one in model.parameters() for value in (one.detach(), one.grad)])
        found[-1] += [buffer.clone() for buffer in model.buffers()]
    for have, want in zip(*found, strict=True):
        torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-5)


def test_a_backward_that_begins_within_a_region_without_gradients() -> None:
    """Gradients may be switched on within the program."""

    def function(weight: torch.Tensor, count: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.enable_grad():
            row = F.normalize(weight, dim=0)
            weight.data.mul_(2)
        return row, count.add_(1)

    with torch.no_grad():
        weight = torch.ones(2, 3, device=NPU).requires_grad_()
        row, count = compiled(function)(weight, torch.zeros(4, device=NPU))
    assert torch.equal(row.cpu(), F.normalize(torch.ones(2, 3), dim=0))
    assert count.tolist() == [1.0] * 4
