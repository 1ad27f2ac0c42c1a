"""What a campaign runs: kinds of items, their settings, and the answer to an item. Imports nothing of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple


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


KindNamed = Callable[[str], ItemKind]
"""Finds a kind by its name: a kind that runs the items of others is given it, because the list of all kinds stands above."""
