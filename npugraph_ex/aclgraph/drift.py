"""Notices a number that is another at every call, such as a step or a learning rate, and ends up in captured kernels.

A capture for each value would cost more than it ever saves. Sizes are not meant: they come again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from npugraph_ex.aclgraph.inputs import InputPlan
from npugraph_ex.aclgraph.scopes import Runner
from npugraph_ex.observe.logger import logger

MOST_FRUITLESS = 16
"""How many captures in a row are made for new values of such numbers while no captured value comes again."""

_Key = tuple[tuple[Any, ...], tuple[int, ...]]


class Plain:
    """Runs the graph operator by operator where the captures of a key would stand.

    Args:
        forward: of the graph.
    """

    def __init__(self, forward: Runner) -> None:
        self._forward = forward

    def run(self, inputs: list[Any]) -> list[Any]:
        """Run with ``inputs``."""
        return list(self._forward(*inputs))


class Drift:
    """What one graph knows of its numbers.

    Args:
        plan: which numbers there are.
        graph: under which number `report.graphs` knows the graph.

    Attributes:
        fruitless: captures since a captured value came again, that differ from earlier ones in such numbers alone.
    """

    def __init__(self, plan: InputPlan, graph: int) -> None:
        self._plan = plan
        self._graph = graph
        self._warned = False
        self.fruitless = 0

    def gives_up(self, key: _Key, known: Iterable[_Key]) -> bool:
        """Whether a call that needs a new capture had better run without one."""
        loose = self._plan.loose
        rest = self._without(key) if loose else None
        alike = (
            next((other for other in reversed(list(known)) if self._without(other) == rest), None) if loose else None
        )
        if alike is None:
            return False
        self.fruitless += 1
        if self.fruitless <= MOST_FRUITLESS:
            return False
        if not self._warned:
            self._warned = True
            names = [name for index, name in loose.items() if key[0][index] != alike[0][index]]
            logger.warning(
                "Graph %d was captured for %d values of %s in a row, none of which came again; for further new values it runs "
                "operator by operator. Hand the number over as a tensor on the device, which needs one capture",
                self._graph,
                MOST_FRUITLESS + 1,
                ", ".join(names),
            )
        return True

    def _without(self, key: _Key) -> tuple[object, ...]:
        """A key without the numbers that may drift."""
        numbers, addresses = key
        return (*(number for index, number in enumerate(numbers) if index not in self._plan.loose), addresses)
