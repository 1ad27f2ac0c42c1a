"""Changing sizes: what a new one costs, what returning to one costs, and that calls leave nothing behind."""

from __future__ import annotations

from both import BUNDLED, OURS, ask
from tables import Table

SIZES = 64


def test_sizes_come_and_go(table: Table) -> None:
    """64 sizes: returning to one costs a replay and no capture, and 10,000 calls leave not one byte."""
    answers = ask("recapture", str(SIZES))
    for backend in (OURS, BUNDLED):
        table("dynamic sizes, ms of processor time", backend=backend, sizes=SIZES, **answers[backend][0])
    ours = answers[OURS][0]
    assert ours["known size"] <= ours["new size"] / 3
    assert ours["bytes left by 10,000 calls"] <= 0
