"""How fast the conformance suite's examples are: what bounds how many of them a change can be checked with."""

from __future__ import annotations

import time

import pytest
from tables import Table

from npugraph_ex.testing.families import FAMILIES

EXAMPLES = 30
BESIDE_A_GRAPH = 40
"""An example that captures and replays may cost so many examples that only run the passes: torch.compile is what it costs."""


def milliseconds(family: str) -> float:
    """Processor time of one example, the mean over the same seeds every time; each must be right."""
    example = FAMILIES[family]
    assert not example(0)  # prepares the rules
    start = time.process_time()
    for seed in range(1, EXAMPLES + 1):
        assert not example(seed)
    return (time.process_time() - start) / EXAMPLES * 1e3


@pytest.fixture(scope="module")
def costs() -> dict[str, float]:
    """Milliseconds an example, by family."""
    return {family: milliseconds(family) for family in ("planted", "exact", "streams", "device")}


def test_examples_a_second(costs: dict[str, float], table: Table) -> None:
    """Each family beside the cheapest, so that one which becomes slow is seen on any machine."""
    for family, cost in costs.items():
        row = {"ms an example": cost, "examples a second": 1e3 / cost, "of the cheapest": cost / min(costs.values())}
        table("the conformance suite, processor time", part=family, **row)
    assert max(costs.values()) <= BESIDE_A_GRAPH * min(costs.values())
