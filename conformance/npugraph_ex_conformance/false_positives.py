"""Counts false alarms: random programs through the library as it is, in which nothing may be found wrong."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType

from npugraph_ex._garbage_collection import rare_collection
from npugraph_ex.fusion.rules import RULE_NAMES
from npugraph_ex.testing.generator.client_operators import client_operators
from npugraph_ex.testing.generator.strategies import planted_programs
from npugraph_ex_conformance.examples import FAMILIES, SPELLED, Example, programs

_ELSEWHERE = {
    "streams",
    "forms",
    "events",
    "random numbers",
    "updates",
    "cache",
    "shared pool",
    "idioms",
    "planted",
    "spellings in turn",
    *SPELLED,
}
"""Families without values to judge, one that is a rule's own, and those of which "spellings" draws all."""

JUDGED: Mapping[str, Example] = MappingProxyType(
    {
        **{f"planted {rule}": programs(partial(planted_programs, pattern=rule), "fx") for rule in RULE_NAMES},
        **{name: family for name, family in FAMILIES.items() if name not in _ELSEWHERE},
    }
)
"""The families of random programs whose values the oracle judges, and every rule's own programs."""


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
    alarms, names = Alarms(), tuple(JUDGED)
    with client_operators(), rare_collection():
        for number in range(first, first + examples):
            family, start = names[number % len(names)], time.process_time()
            message = JUDGED[family](number // len(names))
            alarms.examples[family] += 1
            alarms.seconds[family] += time.process_time() - start
            if message:
                alarms.raised.append((family, number, message))
            if on_example is not None:
                on_example(alarms)
    return alarms
