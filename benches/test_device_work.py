"""What a compiled call does on the device, counted: kernels, copies, modelled time, memory."""

from __future__ import annotations

import json

import pytest
from both import BUNDLED, OURS, ask
from decoders import device_models
from tables import Table

NAMES = tuple(device_models())
COUNTS = ("kernels", "copies", "modelled us", "pool bytes")


@pytest.mark.parametrize("name", NAMES)
def test_does_no_more_than_bundled(name: str, table: Table) -> None:
    """Never more kernels, copies, modelled microseconds or bytes than the bundled backend, nor kernels than eager mode."""
    answers = ask("device_work", *map(json.dumps, NAMES))
    ours, theirs = (answers[backend][NAMES.index(name)] for backend in (OURS, BUNDLED))
    row = {"eager kernels": ours["eager kernels"], "eager us": ours["eager modelled us"]}
    for count in COUNTS:
        row |= {count: ours[count], f"bundled {count}": theirs[count]}
    table("device work of one call; times are modelled by a roofline, not measured", model=name, **row)
    assert ours["kernels"] <= ours["eager kernels"]
    for count in COUNTS:
        assert ours[count] <= theirs[count], count
