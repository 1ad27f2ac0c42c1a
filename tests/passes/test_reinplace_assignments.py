"""Assignments to a part, to all and through views of all: computed in the memory that they overwrite where nobody could tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from device_helpers import random
from reinplacing import operators

from npugraph_ex import last_report

aten = torch.ops.aten


def test_assignment_to_a_slice_is_restored() -> None:
    """`x[1:] = y` becomes a view and a copy into it: nothing else is copied."""

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x[1:] = y
        return y * 2

    found = operators(function, random(4, 4), random(3, 4))
    assert "aten.slice_scatter.default" not in found
    assert found.count("aten.copy_.default") == 1


def assign(values: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Overwrite the whole input with what is computed from it, and read it."""

    def function(x: torch.Tensor) -> torch.Tensor:
        x.copy_(values(x))
        return x + 1

    return function


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (assign(lambda x: x * 2 + 1), ["mul_.Tensor", "add_.Tensor", "add.Tensor"]),
        (lambda x: assign(lambda y: y * 3)(x + 1), ["add.Tensor", "mul_.Tensor", "add_.Tensor"]),
        (
            assign(lambda x: assign(lambda y: y * 3)(x).exp()),
            ["mul_.Tensor", "add_.Tensor", "exp_.default", "add.Tensor"],
        ),
        (assign(lambda x: (x * 2).half()), ["mul_.Tensor", "_to_copy.default", "copy_.default", "add.Tensor"]),
        (assign(lambda x: x.roll(1)), ["roll.default", "copy_.default", "add.Tensor"]),
        (
            assign(lambda x: (x + x.sum()) * x),
            ["sum.default", "add.Tensor", "mul_.Tensor", "copy_.default", "add.Tensor"],
        ),
    ],
    ids=["input", "intermediate", "twice", "other dtype", "no in-place form", "read once more"],
)
def test_assignment_to_the_whole(function: Callable[..., Any], expected: list[str]) -> None:
    """`x.copy_(f(x))` does not read `x` but in `f`: what can work in place does, and the assignment costs nothing then."""
    assert operators(function, random(4, 4)) == [f"aten.{name}" for name in expected]


def _assigned(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x[:] = (x + y).relu()
    return x.sum()


def _copied_over(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    rows = x.view(-1)[:]
    rows.copy_((rows + y.view(-1)).relu())
    return (rows * 2).exp()


def _worked_on(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.add_(y)
    x[:].mul_(2)
    x[:, ::1].exp_()
    return x + 1


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (_assigned, ["add_.Tensor", "relu_.default", "sum.default"]),
        (lambda x, y: _assigned(x * 3, y), ["mul.Tensor", "add_.Tensor", "relu_.default", "sum.default"]),
        (_copied_over, ["add_.Tensor", "relu_.default", "mul.Tensor", "exp_.default"]),
        (_worked_on, ["add_.Tensor", "mul_.Tensor", "exp_.default", "add.Tensor"]),
    ],
    ids=["input", "intermediate", "through views", "in place"],
)
def test_a_view_of_everything(function: Callable[..., Any], expected: list[str]) -> None:
    """`x[:]` is `x`: what is assigned to it or done to it needs no copy; AOT's scatter keeps nothing of what was there."""
    found = operators(function, random(4, 4), random(4, 4))
    assert [name for name in found if name != "aten.view.default"] == [f"aten.{name}" for name in expected]


def _kept(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    old = x * 1
    before = x.t()
    new = (x + y).relu()
    late = before.sum(0)  # of the bytes as they were
    x[:] = new
    return old.sum() + late


def _returned(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    new = (x + y).relu()
    x[:] = new
    return new


def _written_between(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    new = (x + y).relu()
    x[:] = new
    new.add_(1)  # of the values alone
    return new.sum()


def _turned(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x[:] = x.t() + x
    return y + 1


@pytest.mark.parametrize(
    ("function", "kept"),
    [
        (_kept, "aten.add.Tensor"),
        (_returned, "aten.copy_.default"),
        (_written_between, "aten.copy_.default"),
        (_turned, "aten.copy_.default"),
        (lambda x, y: x[:3].copy_((x[:3] + y[:3]).relu()).sum(), "aten.copy_.default"),
        (lambda x, y: x[::2].copy_((x[::2] + y[::2]).relu()).sum(), "aten.copy_.default"),
        (lambda x, y: x[1:].copy_(x[:3] * y[1:]).sum(), "aten.copy_.default"),
        (lambda x, y: x[:].copy_((x * y).half()).sum(), "aten.copy_.default"),
        (lambda x, y: x[:].copy_(y[0] * 2).sum(), "aten.copy_.default"),
        (lambda x, y: x[:].copy_(y.t() * 2).sum(), "aten.copy_.default"),
    ],
    ids=[
        "old value read later", "value returned", "value written later", "overlapping views", "first rows", "every second",
        "overlapping rows", "other dtype", "broadcast", "other strides",
    ],
)  # fmt: skip
def test_a_view_of_everything_with_something_else(function: Callable[..., Any], kept: str) -> None:
    """Other bytes, other layouts, other users: what has to be computed in memory of its own is, and values are right."""
    assert kept in operators(function, random(4, 4), random(4, 4))
    report = last_report()
    assert report is not None
    assert "rolled back" not in [record.outcome for record in report.passes]


@pytest.mark.slow
def test_a_view_up_to_a_size_that_varies() -> None:
    """`x[:n]` is not taken for all of `x` where `n` is a symbol, even if they are equal at the first call."""

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x[: y.size(0)] = y * 2
        return x.sum()

    compiled = torch.compile(function, backend="npugraph_ex", dynamic=True)
    for rows, given in ((6, 4), (6, 6), (9, 5), (5, 5)):
        x, y = random(rows, 4), random(given, 4)
        there, here = x.cpu(), y.cpu()
        expected = function(there, here)
        torch.testing.assert_close(compiled(x, y).cpu(), expected)
        torch.testing.assert_close(x.cpu(), there)
