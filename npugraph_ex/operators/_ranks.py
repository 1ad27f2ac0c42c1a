"""Formulas of operators that compute and communicate in one: what a rank gives, and what it makes of what all ranks gave.

Such a formula is a generator function with its operator's signature. Before the exchange it computes from this rank's arguments
alone, without a look at values; it yields an ``Exchange``, gets ``Ranks``, and returns the results::

    everyone = yield Exchange(hcom, (x @ x2,))
    return total(everyone)

One process cannot say what such an operator computes, unless it knows what the others give. ``alone`` is for what needs no other:
metadata, precision and signatures.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch


class Exchange(NamedTuple):
    """What one rank gives.

    Attributes:
        group: the name of the HCCL group.
        given: tensors, alike on every rank in number, shapes and dtypes.
        rows: None where every rank gets all of ``given``; else how many rows each rank gets from here, one behind the other, and
            how many each one gives. The number of rows may differ from rank to rank then.
        ranks: the size of the group that the arguments name.
        rank: the rank in it that the arguments name.
        alike: other arguments by name, in which no rank may differ.
    """

    group: str
    given: tuple[torch.Tensor, ...]
    rows: tuple[Sequence[int], Sequence[int]] | None = None
    ranks: int | None = None
    rank: int | None = None
    alike: Mapping[str, object] = {}


class Ranks(NamedTuple):
    """What the ranks of a group gave.

    Attributes:
        ranks: the size of the group.
        rank: this rank.
        parts: for each rank, in order, the tensors that it gave to this one.
    """

    ranks: int
    rank: int
    parts: Sequence[tuple[torch.Tensor, ...]]


Steps = Generator[Exchange, Ranks, Any]
Result = TypeVar("Result")
_FEWEST = 2


def together(formula: Callable[..., Steps], calls: Sequence[tuple[Sequence[Any], Mapping[str, Any]]]) -> list[Any]:
    """The results of every rank, from the ``(args, kwargs)`` of every rank; the ranks are those of one group."""
    steps = [formula(*args, **kwargs) for args, kwargs in calls]
    exchanges = [next(running) for running in steps]
    found = []
    for rank, running in enumerate(steps):
        parts = [_part(exchange, rank) for exchange in exchanges]
        try:
            running.send(Ranks(len(calls), rank, parts))
        except StopIteration as finished:
            found.append(finished.value)
    return found


def alone(formula: Callable[..., Steps]) -> Callable[..., Any]:
    """The results of a formula where every rank gives the same, of the group and for the rank that the arguments name."""

    @functools.wraps(formula)
    def run(*args: Any, **kwargs: Any) -> Any:
        steps = formula(*args, **kwargs)
        exchange = next(steps)
        ranks, rank = exchange.ranks or _FEWEST, exchange.rank or 0
        rows = [None] * ranks if exchange.rows is None else exchange.rows[1]
        parts = [exchange.given if count is None else _shaped(exchange.given, count) for count in rows]
        try:
            steps.send(Ranks(ranks, rank, parts))
        except StopIteration as finished:
            return finished.value
        raise RuntimeError(f"{formula.__qualname__} yields twice; it may yield once")

    return run


def _part(exchange: Exchange, rank: int) -> tuple[torch.Tensor, ...]:
    """What a rank gets from another one."""
    if exchange.rows is None:
        return exchange.given
    return tuple(tensor.split(list(exchange.rows[0]))[rank] for tensor in exchange.given)


def _shaped(given: tuple[torch.Tensor, ...], rows: int) -> tuple[torch.Tensor, ...]:
    """As many rows of these tensors, from their first one on and round again."""
    return tuple(
        tensor[torch.arange(rows, device=tensor.device) % tensor.shape[0]]
        if tensor.shape[0]
        else tensor.new_zeros(rows, *tensor.shape[1:])
        for tensor in given
    )


def total(everyone: Ranks) -> torch.Tensor:
    """The sum of what the ranks gave, rank 0 first, each sum rounded to the dtype: as a reduction of HCCL gives it."""
    return functools.reduce(torch.add, [part[0] for part in everyone.parts])
