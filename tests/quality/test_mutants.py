"""The suite notices deliberate faults: every mutant is killed by random programs, within a budget of examples."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from npugraph_ex import testing
from npugraph_ex.testing import Case, Program

RULE = "add_rms_norm_dynamic_quant"
BUDGET = 250
STRATEGIES = {
    "planted": lambda: testing.programs(pattern=RULE),
    "near-miss": lambda: testing.programs(pattern=RULE, near_miss=True),
    "integers": testing.integer_programs,
}


class _KilledError(Exception):
    """An example failed, as it should."""


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    """A mutant makes the library complain at length."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("name", sorted(testing.mutants()))
def test_every_mutant_is_killed(name: str) -> None:
    """With the fault on, some drawn program fails."""

    def check(program: Program) -> None:
        if not testing.check(Case.of(program)).ok:
            raise _KilledError

    chosen = settings(
        max_examples=BUDGET, database=None, deadline=None, derandomize=True, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    found_by = testing.mutants()[name].found_by
    with testing.mutant(name), pytest.raises(_KilledError):
        chosen(given(STRATEGIES[found_by]())(check))()


def test_a_mutant_leaves_nothing_behind() -> None:
    """After the block the right code is back, whatever happened in it."""
    from npugraph_ex.fusion import checks

    right = checks.undisturbed

    def fail_within() -> None:
        with testing.mutant("fusion-ignores-writes-between"):
            assert checks.undisturbed is not right
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_within()
    assert checks.undisturbed is right


def test_one_mutant_at_a_time() -> None:
    """Two faults at once would say nothing about either; an unknown one is named."""
    with testing.mutant("replay-skips-an-input"), pytest.raises(ValueError, match="on already"):
        testing.mutant("fusion-never-matches").__enter__()
    with pytest.raises(ValueError, match="fusion-never-matches"):
        testing.mutant("typo").__enter__()
