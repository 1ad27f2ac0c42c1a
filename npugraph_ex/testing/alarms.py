"""Counts false alarms: random programs through the library as it is, in which nothing may be found wrong."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from npugraph_ex.testing.families import FAMILIES

JUDGED = tuple(name for name in FAMILIES if name not in {"streams", "forms", "updates", "shared pool"})
"""The families of random programs whose values the oracle judges."""


@dataclass
class Alarms:
    """What came of a run.

    Attributes:
        examples: how many of each family.
        seconds: of processor time, for each family.
        raised: each alarm: family, number of the example, message.
    """

    examples: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    raised: list[tuple[str, int, str]] = field(default_factory=list)


def count_alarms(examples: int, *, first: int = 0, on_example: Callable[[Alarms], None] | None = None) -> Alarms:
    """Check ``examples`` programs, of each family in turn.

    Args:
        examples: how many, at least one.
        first: the number of the first; a number is the same program everywhere, so that a count can be divided.
        on_example: told of the count after each.

    Raises:
        ValueError: examples is below one.
    """
    if examples < 1:
        raise ValueError(f"count_alarms(examples=...) takes an int >= 1; it is {examples}.")
    alarms = Alarms()
    for number in range(first, first + examples):
        family, start = JUDGED[number % len(JUDGED)], time.process_time()
        message = FAMILIES[family](number // len(JUDGED))
        alarms.examples[family] += 1
        alarms.seconds[family] += time.process_time() - start
        if message:
            alarms.raised.append((family, number, message))
        if on_example is not None:
            on_example(alarms)
    return alarms
