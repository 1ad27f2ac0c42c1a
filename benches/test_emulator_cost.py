"""The emulated device keeps to the costs that it promises; `python benches/emulator_cost.py` prints the figures."""

from __future__ import annotations

from collections.abc import Callable

import emulator_cost
import pytest


@pytest.mark.parametrize("measure", [emulator_cost.eager, emulator_cost.graphs, emulator_cost.importing])
def test_costs(measure: Callable[[], list[tuple[str, float, float]]]) -> None:
    """Processor time of eager operators, of capture and replay with null kernels, and of starting, each under its bar."""
    missed = [f"{name}: {cost:.1f} us, promised {bar:.1f}" for name, cost, bar in measure() if cost > bar]
    assert not missed, "\n".join(missed)
