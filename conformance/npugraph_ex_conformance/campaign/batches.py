"""Items that are handed out together, those of all kinds mixed. Imports nothing of torch: the driver needs it."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from npugraph_ex_conformance.campaign.kinds import kind_named


@dataclass(frozen=True)
class Batch:
    """Items of one kind that one process runs one after the other.

    Attributes:
        kind: their kind.
        numbers: which.
        position: of the first among its kind's, from 0 to 1: batches of all kinds are handed out in this order.
        lost: how often the batch was handed out and its worker did not come back.
    """

    kind: str
    numbers: tuple[int, ...]
    position: float = 0.0
    lost: int = field(default=0, compare=False)


def batches(plan: Mapping[str, int], done: Mapping[str, Collection[int]]) -> Iterator[Batch]:
    """The batches of all that is not done, each kind's evenly over the whole."""
    return heapq.merge(*(_of_kind(name, count, done.get(name, ())) for name, count in plan.items()), key=_position)


def _of_kind(name: str, count: int, done: Collection[int]) -> Iterator[Batch]:
    size = kind_named(name).batch
    for first in range(0, count, size):
        left = tuple(number for number in range(first, min(first + size, count)) if number not in done)
        if left:
            yield Batch(name, left, first / count)


def _position(batch: Batch) -> float:
    return batch.position
