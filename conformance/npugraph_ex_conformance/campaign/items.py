"""What a campaign is made of: items, batches of them, and the answer to each. Imports nothing of torch: the driver needs it."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, NamedTuple

from npugraph_ex.errors import UsageError


class ItemAnswer(NamedTuple):
    """What came of one example.

    Attributes:
        message: what is wrong; empty when nothing is.
        features: what the example reached; the campaign's coverage is the number of different ones.
        label: what the example is, where the number says it to nobody: an operator and a dtype, a model.
        skipped: why the example says nothing; empty where it does.
        value: what was measured, where something was; it can be written as JSON.
    """

    message: str = ""
    features: Iterable[str] = ()
    label: str = ""
    skipped: str = ""
    value: Any = None


@dataclass(frozen=True)
class ItemKind:
    """A kind of item.

    Attributes:
        name: on the command line.
        what: an example, in a few words.
        opened: makes the function that checks example ``number``; called once a process, after the device has started.
        size: how many examples there are; None where there is no end of them.
        shrink: the script of the smallest failure like example ``number``; None where examples are small as they are.
        batch: items that are handed out together: a second or two of work.
        processor: the most seconds of processor time that an item may take.
    """

    name: str
    what: str
    opened: Callable[[CampaignSettings], Callable[[int], ItemAnswer]]
    size: Callable[[CampaignSettings], int] | None = None
    shrink: Callable[[CampaignSettings, int], str] | None = None
    batch: int = 40
    processor: int = 120


@dataclass(frozen=True)
class CampaignSettings:
    """What every process of a campaign is told; all of it can be written as JSON.

    Attributes:
        seed: decides the examples of kinds without an end.
        target: the device: "emulated" or "npu"; empty where examples need none.
        memory: the most GiB of resident memory for the process that runs items.
        nice: how far the processes stand back behind others.
        checkout: a folder with another project's tests, for the kind of these.
        processor: the most seconds of processor time for an item, in place of its kind's.
    """

    seed: int = 0
    target: str = "emulated"
    memory: float = 4.0
    nice: int = 0
    checkout: str = ""
    processor: int | None = None


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


def kind_named(name: str) -> ItemKind:
    """A kind of the registry; or ``module:attribute``, somebody's own.

    Raises:
        UsageError: there is none of this name.
    """
    from npugraph_ex_conformance.campaign.kinds import KINDS

    module, colon, attribute = name.partition(":")
    try:
        found: Any = getattr(import_module(module), attribute) if colon else KINDS[name]
    except (ImportError, AttributeError, KeyError):
        found = None
    if not isinstance(found, ItemKind):
        raise UsageError(
            f"there is no kind of items called {name!r}; there are {', '.join(KINDS)}, and MODULE:NAME for your own"
        )
    return found


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
