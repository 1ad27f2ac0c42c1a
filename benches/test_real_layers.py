"""Layers with the sizes of models that are in use, at several batches: device work, host cost, capture and memory."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from both import BUNDLED, OURS, ask, asked_ahead
from measured_tables import Table
from real_layers import CACHED, REAL

BATCHES = (1, 16, 64, 256)
GROWS = 1.5
"""Times what a call costs the host at the smallest batch, beside an eager operator, that it may cost at another."""


def _questions(name: str, *lift: str) -> tuple[str, ...]:
    return tuple(json.dumps([name, batch, *lift]) for batch in BATCHES)


@pytest.fixture(scope="module", autouse=True)
def _asked_ahead() -> Iterator[None]:
    """Two processes at a time: host costs are compared within a process alone."""
    sides = ((OURS, ("judged",)), (BUNDLED, ()))
    with asked_ahead(*(("real_layer", _questions(name, *lift), backend) for name in REAL for backend, lift in sides)):
        yield


@pytest.mark.parametrize("name", REAL)
def test_real_layers(name: str, table: Table) -> None:
    """One graph whatever the batch, never more kernels, bytes or memory than bundled, and a host cost that does not grow."""
    ours = ask("real_layer", *_questions(name, "judged"), backends=(OURS,))[OURS]
    theirs = ask("real_layer", *_questions(name), backends=(BUNDLED,))[BUNDLED]
    for batch, own, other in zip(BATCHES, ours, theirs, strict=True):
        row: dict[str, float | str] = {"batch": batch}
        for key, unit, column in (
            ("kernels", 1, "kernels"),
            ("bytes", 1e6, "MB"),
            ("modelled us", 1, "modelled us"),
            ("us", 1, "host us"),
        ):
            row[f"eager {column}"] = own[f"eager {key}"] / unit
            row[f"bundled {column}"] = other[key] / unit if key in other else "fails"
            row[column] = own[key] / unit
        for key, unit, column in (("capture ms", 1, "capture ms"), ("pool bytes", 2**20, "pool MiB")):
            row[f"bundled {column}"] = other[key] / unit if key in other else "fails"
            row[column] = own[key] / unit
        table(
            f"a decode step of one layer at its real size, {CACHED} tokens cached, bfloat16; modelled us are no measurement",
            model=name,
            **row,
        )
    for own, other in zip(ours, theirs, strict=True):
        assert own["launched"] == 0, "a call runs operators beside its graph"
        assert own["kernels"] <= own["eager kernels"]
        for key in ("kernels", "bytes", "pool bytes"):
            assert own[key] <= other.get(key, float("inf")), key
        assert own["us"] / own["us of an operator"] <= GROWS * ours[0]["us"] / ours[0]["us of an operator"]
