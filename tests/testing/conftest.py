"""What tests of the toolkit share."""

from __future__ import annotations

import pytest


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few programs tell a wrong replacement from a weak guard, and no smaller wrong program is looked for."""
    for name, few in (("_CLOSER", 4), ("_WIDER", 8), ("_CONFIRMING", 4), ("_OF_EACH", 1), ("_ROUNDS", 2)):
        monkeypatch.setattr(f"npugraph_ex.testing.validation.blame.{name}", few)
    monkeypatch.setattr("npugraph_ex.testing.validation.counterexample._SHRINKING_TRIES", 0)
