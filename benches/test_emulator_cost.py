"""The emulated device keeps to the costs that it promises; `python benches/emulator_cost.py` prints the figures alone."""

from __future__ import annotations

from collections.abc import Callable

import emulator_cost
import pytest
from measured_tables import Table

Costs = list[tuple[str, float, float]]


@pytest.mark.parametrize("measure", [emulator_cost.eager, emulator_cost.graphs, emulator_cost.importing])
def test_costs(measure: Callable[[], Costs], table: Table) -> None:
    """Processor time of eager operators, of capture and replay with null kernels, and of starting, each under its bar."""
    costs = measure()
    if missed(costs):  # on a busy machine: once more, and what is nearer to its promise counts
        costs = [min(pair, key=lambda row: row[1] / row[2]) for pair in zip(costs, measure(), strict=True)]
    for name, cost, bar in costs:
        promised = None if bar == emulator_cost.NO_BAR else bar
        table("the emulated device, us of processor time", part=name, us=cost, promised=promised)
    assert not missed(costs), "\n".join(missed(costs))


def missed(costs: Costs) -> list[str]:
    """The costs above their bars."""
    return [f"{name}: {cost:.1f} us, promised {bar:.1f}" for name, cost, bar in costs if cost > bar]
