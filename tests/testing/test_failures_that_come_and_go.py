"""A program that fails now and then is reported as it failed, and not as an error of the search."""

from __future__ import annotations

import itertools

import pytest

from npugraph_ex import testing
from npugraph_ex.testing.failures import search
from npugraph_ex.testing.oracle.case import Outcome


@pytest.mark.parametrize("failing", [1, 2, 3, 4])
def test_what_failed_is_shown(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it fails no more when it is made smaller, or already when it is asked again."""
    calls = itertools.count()

    def check(_: testing.Case) -> Outcome:
        return Outcome(["optimised, output 0: wrong"] if next(calls) < failing else [])

    monkeypatch.setattr(search, "check", check)
    found = testing.find_failure(testing.exact_programs(), examples=1, route="fx", seed="7")
    assert found is not None
    case, outcome = found
    assert outcome.failures == ["optimised, output 0: wrong"]
    assert case.source == testing.sample(testing.exact_programs(), "7:0").source or failing > 3
