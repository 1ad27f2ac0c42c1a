"""Changing sizes: what a new one costs, what returning to one costs, and that calls leave nothing behind; memory."""

from __future__ import annotations

import json

import pytest
from both import BUNDLED, OURS, ask
from measured_tables import Table

SIZES = 64
COMPILATIONS = 2
"""The first call's, for its very sizes where Dynamo sees fit, and one for every size."""
MEMORY = 1.05
"""Times the memory that the captures for the largest size keep."""
GROWING_MEMORY = 2.0
"""Times that memory, counted in bytes of tensors, where each size is larger than all before it."""
EXPANDABLE_MEMORY = 1.4
"""Times that memory, counted as the device does, if in addition the allocator's segments grow. How many it has depends on when
Python frees what."""
MIB = 1 << 20
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


@pytest.mark.parametrize(
    "way",
    ["dynamic, largest first", "dynamic, smallest first", "dynamic, smallest first, expandable", "static", "session"],
)
def test_sizes_share_memory(way: str, table: Table) -> None:
    """64 sizes keep at most 1.05 times the memory of the largest, also if each is compiled for itself; growing ones take more."""
    backends = (OURS,) if way == "session" else (OURS, BUNDLED)
    answers = ask("size_memory", json.dumps(way), backends=backends)
    for backend in backends:
        figures = {name: value if "of largest" in name else value / MIB for name, value in answers[backend][0].items()}
        table("memory that captures for 64 sizes keep, MiB", kind=way, backend=backend, **figures)
    ours = answers[OURS][0]
    if way in {"dynamic, largest first", "static", "session"}:
        assert max(ours["all of largest, tensors"], ours["all of largest, device"]) <= MEMORY
    else:
        assert ours["all of largest, tensors"] <= GROWING_MEMORY
    if way.endswith("expandable"):
        assert ours["all of largest, device"] <= EXPANDABLE_MEMORY
