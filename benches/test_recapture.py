"""Changing sizes: what a new one costs, what returning to one costs, and that calls leave nothing behind."""

from __future__ import annotations

from both import BUNDLED, OURS, ask
from measured_tables import Table

SIZES = 64
COMPILATIONS = 2
"""The first call's, for its very sizes where Dynamo sees fit, and one for every size."""
OBJECTS_A_CALL = 0.01
"""Python's allocator counts whatever the process does beside the calls: a hundredth of an object a call is none."""


def test_sizes_come_and_go(table: Table) -> None:
    """64 sizes: one compilation and one capture each; returning to one is a replay; 10,000 calls leave nothing."""
    answers = ask("recapture", str(SIZES))
    for backend in (OURS, BUNDLED):
        table("dynamic sizes; times in ms of processor time", backend=backend, sizes=SIZES, **answers[backend][0])
    ours = answers[OURS][0]
    assert ours["known size"] <= ours["new size"] / 3
    assert ours["compilations"] <= COMPILATIONS
    assert ours["captures"] == SIZES
    assert ours["captures on returning"] == ours["compiled again"] == ours["captured again"] == 0
    assert ours["bytes left by 10,000 calls"] <= 0
    assert ours["objects left by 10,000 calls"] <= OBJECTS_A_CALL * 10_000
