"""How fast the conformance suite's examples are: what bounds how many of them a change can be checked with."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from itertools import cycle, islice

import pytest
import torch
from measured_tables import Table
from stages import stages

from npugraph_ex._garbage_collection import rare_collection
from npugraph_ex.fusion.rules import RULE_NAMES
from npugraph_ex.testing.generator import strategies
from npugraph_ex.testing.generator.client_operators import client_operators
from npugraph_ex.testing.generator.near_misses import applicable
from npugraph_ex.testing.generator.patterns import registered_patterns
from npugraph_ex.testing.generator.strategies import Maker, exact_programs, planted_programs
from npugraph_ex.testing.oracle.case import Case
from npugraph_ex.testing.oracle.checking import check
from npugraph_ex_conformance.examples import FAMILIES

EXAMPLES = 30
BY_ROUTE = {"fx": 240, "graph": 40}
"""How many are enough that one of which the judge takes long does not decide the mean."""
WARM_UP = {"fx": 100, "graph": 20}
"""How many come before them, uncounted: the first programs of a process pay for what is set up once."""
BARS = {"fx": 20, "graph": 8}
"""How many examples a second of one core are aimed at, by route; printed beside the figure, no gate."""
ROUTES = {"fx": "passes alone", "graph": "compile, capture, replays"}
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


def _planted(*, near_miss: bool) -> list[Maker]:
    """What makes programs for each rule; for those of which something is a near-miss."""
    with client_operators():
        return [
            planted_programs(pattern=name, near_miss=near_miss)
            for name in sorted(RULE_NAMES)
            if not near_miss or any(map(applicable, registered_patterns(name)))
        ]


KINDS: dict[str, Callable[[], list[Maker]]] = {
    "integers": lambda: [exact_programs()],
    "planted": partial(_planted, near_miss=False),
    "near-miss": partial(_planted, near_miss=True),
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("kind", KINDS)
def test_where_the_time_goes(kind: str, route: str, table: Table) -> None:
    """Each kind of program at both levels, every rule in turn, beside the rate that is aimed at; and each stage of it."""
    makers, threads, examples = KINDS[kind](), torch.get_num_threads(), BY_ROUTE[route]
    torch.set_num_threads(1)  # the rate is one core's
    try:
        with client_operators(), rare_collection(), stages() as found:
            for number, maker in enumerate(islice(cycle(makers), WARM_UP[route] + examples)):
                if number == WARM_UP[route]:
                    found.seconds.clear()
                    start = time.process_time()
                assert not check(Case.of(strategies.sample(maker, number), route=route)).failures
            seconds = time.process_time() - start
    finally:
        torch.set_num_threads(threads)
    row = {"a second of a core": examples / seconds, "aimed at": BARS[route], "ms an example": seconds / examples * 1e3}
    table("the conformance suite by kind", kind=kind, level=ROUTES[route], **row)
    for stage, spent in found.seconds.most_common():
        table(
            "the conformance suite by stage", kind=kind, level=ROUTES[route], stage=stage,
            **{"ms an example": spent / examples * 1e3},
        )  # fmt: skip
    assert sum(found.seconds.values()) > 0.8 * seconds  # no stage is missing
