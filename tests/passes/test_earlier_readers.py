"""Small readers of a value run before the operator that can then write in its memory: which may, and which may not."""

from __future__ import annotations

import random as random_numbers
from collections.abc import Callable
from typing import Any

import pytest
import torch
from device_helpers import NPU, check, compiled, random
from reinplacing import operators, with_sum
from torch import fx

from npugraph_ex.passes.earlier_readers import EarlierReaders

BLOCK = 512
VIEWS = {"aten.select.int", "aten.slice.Tensor", "aten.t.default"}


def kernels(function: Callable[..., Any], *inputs: torch.Tensor, **options: object) -> list[str]:
    """The optimised operators that compute something, of a program whose values are right."""
    return [operator for operator in operators(function, *inputs, **options) if operator not in VIEWS]


def scaled_row(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Map (n, m) to the same shape, and return a row of what is overwritten on the way."""
    value = x + 1
    return value.exp(), value[0].neg()


@pytest.mark.parametrize(
    ("name", "function", "order"),
    [
        ("a row", with_sum(lambda a: (a.exp(), a[0].neg())), ["add.Tensor", "neg.default", "exp_.default"]),
        ("all", with_sum(lambda a: (a.exp(), a.sum())), ["add.Tensor", "sum.default", "exp_.default"]),
        (
            "a view of a view",
            with_sum(lambda a: (a.exp(), a.t()[1:3].t()[:2].neg())),
            ["add.Tensor", "neg.default", "exp_.default"],
        ),
        (
            "two rows into one result",
            with_sum(lambda a: (a.exp(), a[0] * a[1])),
            ["add.Tensor", "mul.Tensor", "exp_.default"],
        ),
        (
            "a row, after a reader that is as large",
            with_sum(lambda a: (a.exp(), (a * 2).tanh(), a[0].neg())),
            ["add.Tensor", "exp.default", "neg.default", "mul_.Tensor", "tanh_.default"],
        ),
    ],
)
def test_a_small_reader_runs_first(name: str, function: Callable[..., Any], order: list[str]) -> None:
    """The operator works in place, and its value is right."""
    assert kernels(function, random(16, 16)) == [f"aten.{operator}" for operator in order], name


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("as large as the value", with_sum(lambda a: (a.exp(), a * 2))),
        ("of a block as large", with_sum(lambda a: (a.exp(), a[:15] * 2, a[1:] * 3))),
        ("of what is computed later", with_sum(lambda a: ((b := a.exp()), a[0] * b[0]))),
        ("that returns the value", with_sum(lambda a: (a.exp(), a[0]))),
        ("more than may move", with_sum(lambda a: (a.exp(), *(a[row].neg() for row in range(5))))),
        ("random", lambda x: ((a := x * 0).exp(), torch.bernoulli(a[0]))),
    ],
)
def test_stays(name: str, function: Callable[..., Any]) -> None:
    """A reader that may not move keeps the operator out of the memory that it reads."""
    assert "aten.exp.default" in operators(function, random(16, 16)), name


def test_what_a_write_changes_is_read_after_it() -> None:
    """The memory of `cat` is there before `exp`, and one of its rows is computed into it after `exp`."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        value, first = x + 1, x[:1] * 2
        result = value.exp()
        rows = torch.cat([first, x[1:2].tanh()])
        return result, value[0] * rows[1]

    assert "aten.exp.default" in operators(function, random(16, 16))


def test_a_reader_that_moved_overwrites_nothing() -> None:
    """It stands beside the operator, which may read the same memory: `exp` adds what the row's reader could overwrite."""

    def function(x: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        value, other = x + 1, row + 1
        return value.add(other), other.mul(value[0])

    found = kernels(function, random(16, 16), random(16))
    assert found == ["aten.add.Tensor", "aten.add.Tensor", "aten.mul.Tensor", "aten.add_.Tensor"]


def test_a_row_that_was_copied_early_is_written() -> None:
    """The copy of the row runs before `value` is overwritten, so it is what the later assignment writes."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        target, value = torch.zeros_like(x), x * 2
        result = value.exp()
        target[0] = value[0]
        return result, target

    assert "aten.exp_.default" in kernels(function, random(16, 16))


@pytest.mark.slow
def test_at_any_size() -> None:
    """With symbolic sizes a reader moves where it is smaller at each of them, and stays where it need not be."""
    graph = compiled(scaled_row, dynamic=True)
    for size in (4, 64, 5):
        x = random(size, 256)
        for have, want in zip(graph(x), scaled_row(x), strict=True):
            assert torch.equal(have.cpu(), want.cpu())
    check(scaled_row, [(random(size, 1),) for size in (2, 3)], dynamic=True)


def test_the_memory_that_it_saves() -> None:
    """The captured graph takes the value once, and a block for the row."""
    x = random(256, 256)
    graph, before = compiled(scaled_row, dynamic=False), torch.npu.memory_allocated()
    torch.npu.reset_peak_memory_stats()
    results = graph(x)
    buffer_of_input, value = x.nbytes, x.nbytes
    assert torch.npu.max_memory_allocated() - before <= buffer_of_input + value + 8 * BLOCK
    assert torch.equal(results[1].cpu(), (x[0] + 1).neg().cpu())


def program_of_rows(seed: int) -> str:
    """A program of operators on (6, 6), of rows and columns that are read at any time, and of writes to rows.

    Some rows are written from parts of other values, into memory of their own, an input or a value.
    """
    draw = random_numbers.Random(seed)
    lines = ["z = torch.zeros_like(x)", "a = x + 1", "b = y * 3", "c = x[0] + 2"]
    large, small = ["a", "b"], ["c"]

    def part() -> str:
        value, place = draw.choice(large[-3:-1]), draw.randrange(6)
        return f"{value}[{place}]" if draw.random() < 0.7 else f"{value}[:, {place}]"

    for number in range(14):
        value, other, what = draw.choice(large[-2:]), draw.choice(large[-2:]), draw.randrange(10)
        new = f"v{number}"
        if what < 3:
            lines.append(f"{new} = " + draw.choice((f"-{value}", f"{value}.abs()", f"{value} + {other}")))
            large.append(new)
        elif what < 6:
            lines.append(f"{new} = {part()} - {draw.choice((part(), small[-1]))}")
            small.append(new)
        elif what == 6:
            rows = f"-{part()}.reshape(1, 6), {draw.choice(small)}.abs().reshape(1, 6), {other}[2:]"
            lines.append(f"{new} = torch.cat([{rows}])")
            large.append(new)
        elif what == 7:
            lines.append(f"{draw.choice((value, 'y'))}[{draw.randrange(6)}].add_(5)")
        else:
            target = draw.choice([name for name in ("z", "z", "y", value) if name not in large[-3:-1]])
            lines.append(f"{target}[{draw.randrange(6)}] = {part()}")
    body = "\n    ".join([*lines, f"return ({', '.join(small)}, {large[-1]}, z)"])
    return f"def function(x, y):\n    {body}\n"


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 60, 10))
def test_random_programs(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs in which readers move compute and write what they do in eager mode."""
    moved: list[fx.Node] = []
    move = EarlierReaders.move

    def noting(self: EarlierReaders, readers: list[fx.Node], node: fx.Node) -> None:
        moved.extend(readers)
        move(self, readers, node)

    monkeypatch.setattr(EarlierReaders, "move", noting)
    for seed in range(first, first + 10):
        namespace: dict[str, Any] = {"torch": torch}
        text = program_of_rows(seed)
        exec(text, namespace)  # noqa: S102 - Dynamo would trace what draws the program
        function = namespace["function"]
        graph = compiled(function)
        for _ in range(2):
            inputs = [torch.randint(-99, 99, (6, 6), dtype=torch.int32, device=NPU) for _ in range(2)]
            theirs = [value.clone() for value in inputs]
            for have, want in zip((*graph(*inputs), *inputs), (*function(*theirs), *theirs), strict=True):
                assert torch.equal(have.cpu(), want.cpu()), text
    assert moved
