"""The passes alone, on the CPU, without a device: many programs in little time, before the rest is looked at."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from npugraph_ex import testing
from npugraph_ex.fusion.rules import RULE_NAMES
from npugraph_ex.testing.generator.client_operators import client_operators
from npugraph_ex.testing.generator.near_misses import applicable
from npugraph_ex_conformance.examples.collectives import collective_example
from npugraph_ex_conformance.examples.wrong_passes import wrong_pass_example
from npugraph_ex_conformance.session import Run

with client_operators():
    PLANTED = [
        pytest.param(name, near_miss, id=f"{name}-{'near-miss' if near_miss else 'planted'}")
        for name in sorted(RULE_NAMES)
        for near_miss in (False, True)
        if not near_miss or any(map(applicable, testing.registered_patterns(name)))
    ]


@pytest.fixture(autouse=True, scope="module")
def _operators() -> Iterator[None]:
    """As in ``test_patterns.py``."""
    with client_operators():
        yield


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_integers_through_the_passes(run: Run, dynamic: bool) -> None:
    """Views, aliases, writes, concatenations, no-ops on integers: what the passes leave computes the same to the bit."""
    maker = testing.exact_programs(dynamic=dynamic)
    run.explore(f"passes {dynamic}", maker, examples=run.profile.passes, route="fx", what="(passes)")


@pytest.mark.parametrize(("pattern", "near_miss"), PLANTED)
def test_patterns_through_the_passes(run: Run, pattern: str, near_miss: bool) -> None:
    """Every rule, fused where it must be and left alone where it must not, judged by the float64 reference."""
    maker = testing.planted_programs(pattern=pattern, near_miss=near_miss)
    name = f"passes {pattern} {near_miss}"
    run.explore(name, maker, examples=run.profile.planted_passes, route="fx", what=pattern)


def test_wrong_passes(run: Run) -> None:
    """Whatever a pass does to a graph by chance: what a caller could see is refused or undone, and what changes nothing stays."""
    run.check_examples(wrong_pass_example, run.profile.passes // 8, what="(wrong passes)", kind="wrong pass")


def test_collectives_through_the_passes(run: Run) -> None:
    """The same collectives in the same order; the same values, whether they read their arguments at once or as late as they may."""
    run.check_examples(collective_example, run.profile.passes // 8, what="(collectives)", kind="collectives")
