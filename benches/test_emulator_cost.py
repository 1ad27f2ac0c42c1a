"""The emulated device keeps to the costs that it promises; `python benches/emulator_cost.py` prints the figures alone."""

from __future__ import annotations

from collections.abc import Callable

import emulator_cost
import pytest
from measured_tables import Table

Costs = list[emulator_cost.Cost]
RATIOS = (emulator_cost.checking, emulator_cost.decoding)
TIMES = (emulator_cost.eager, emulator_cost.graphs, emulator_cost.importing)

_TIMES = "the emulated device, us of processor time"


@pytest.mark.parametrize("measure", [*TIMES, *RATIOS])
def test_costs(measure: Callable[[], Costs], table: Table) -> None:
    """Eager operators, capture and replay with null kernels, starting, checks, a real decode step: each under its bar."""
    costs = measure()
    if missed(costs):  # on a busy machine: once more, and what is nearer to its promise counts
        costs = [min(pair, key=lambda row: row.measured / row.promised) for pair in zip(costs, measure(), strict=True)]
    title, column = ("the emulated device, ratios", "times") if measure in RATIOS else (_TIMES, "us")
    for part, measured, bar, aim in costs:
        promised = None if bar == emulator_cost.NO_BAR else bar
        table(title, part=part, **{column: measured, "promised": promised, "aimed at": aim})
    assert not missed(costs), "\n".join(missed(costs))


def missed(costs: Costs) -> list[str]:
    """The costs above their bars."""
    return [
        f"{row.part}: {row.measured:.1f}, promised {row.promised:.1f}" for row in costs if row.measured > row.promised
    ]
