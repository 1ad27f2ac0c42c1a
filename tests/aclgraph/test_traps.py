"""The known traps of mutation, each as a small program compared with eager mode over at least three calls.

Ids are the public threads in which a shipped system fell into the trap.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from device_helpers import NPU, check, compiled, random


def read_before_write(x: torch.Tensor) -> torch.Tensor:
    """Torch's own `remove_noop_ops`: a copy taken before a write must not turn into the written tensor."""
    before = x.clone()
    x.add_(1)
    return before + 0


def no_op_slice_then_write(x: torch.Tensor) -> torch.Tensor:
    """A slice of everything, read after a write to its base."""
    part = x[:]
    x.mul_(2)
    return part + 1


def scatter_then_zero(x: torch.Tensor) -> torch.Tensor:
    """pytorch#198096: a slice_scatter result folded into an input that a later write overwrites."""
    y = torch.slice_scatter(x, torch.ones(2, 4, device=NPU), 0, 1, 3)
    x.zero_()
    return y


def diagonal_then_zero(x: torch.Tensor) -> torch.Tensor:
    """pytorch#198096, diagonal_scatter."""
    y = torch.diagonal_scatter(x, torch.ones(4, device=NPU))
    x.zero_()
    return y


def transposed_operand(x: torch.Tensor) -> torch.Tensor:
    """pytorch#198260, #198031: an operator that reads the storage it would write."""
    x.copy_(x + x.t())
    return x.sum()


def written_twice(x: torch.Tensor) -> torch.Tensor:
    """pytorch#132196: one input mutated twice, read in between."""
    x.add_(1)
    between = x * 2
    x.mul_(3)
    return between


def strides_of_functionalized(x: torch.Tensor) -> torch.Tensor:
    """pytorch#186328: the strides of an in-place result are its destination's."""
    y = x.t().clone(memory_format=torch.preserve_format)
    y.add_(1)
    return y


def write_through_a_view(x: torch.Tensor) -> torch.Tensor:
    """A write through a view reaches the base and its other views."""
    row, column = x[0], x[:, 0]
    row.fill_(5)
    column.mul_(2)
    return x.sum(0) + row


def scatter_into_input(x: torch.Tensor) -> torch.Tensor:
    """Indexed writes to an input, the result used afterwards."""
    x.index_put_((torch.tensor([0, 2], device=NPU),), torch.ones(2, 4, device=NPU), accumulate=True)
    return x * 2


MUTATION = [
    read_before_write,
    no_op_slice_then_write,
    scatter_then_zero,
    diagonal_then_zero,
    transposed_operand,
    written_twice,
    strides_of_functionalized,
    write_through_a_view,
    scatter_into_input,
]


@pytest.mark.parametrize("program", MUTATION, ids=lambda program: program.__name__)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_mutation(program: Callable[..., Any], dynamic: bool) -> None:
    """Values, strides, aliasing and the inputs afterwards are eager's."""
    check(program, [(random(4, 4),) for _ in range(4)], dynamic=dynamic)


def test_results_survive_the_next_replays() -> None:
    """pytorch#148439, #158551: results handed out earlier are not overwritten."""
    graph = compiled(lambda x: x.softmax(-1))
    inputs = [random(3, 5) for _ in range(6)]
    results = [graph(x) for x in inputs]
    for x, result in zip(inputs, results, strict=True):
        torch.testing.assert_close(result.cpu(), x.cpu().softmax(-1))


@pytest.mark.slow
def test_two_graphs_of_one_model_do_not_share_state() -> None:
    """Graphs of several sizes in one pool each keep their own inputs and results."""
    graph = compiled(lambda x, y: (x @ y).relu() + x.sum(), dynamic=True)
    kept = []
    for size in (3, 5, 3, 7, 5, 3):
        x, y = random(size, 4), random(4, size)
        kept.append((graph(x, y), (x @ y).relu() + x.sum()))
    for have, want in kept:
        torch.testing.assert_close(have, want, rtol=0, atol=0)
