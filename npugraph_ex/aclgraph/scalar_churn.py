"""Notices a scalar that differs at every call, such as a step or a learning rate, and whose value a capture fixes.

A capture for each value would cost more than it ever saves. Sizes are not counted, because they repeat.
"""

from __future__ import annotations

from npugraph_ex.aclgraph.capture_cache import CaptureCache, GraphKey
from npugraph_ex.aclgraph.inputs import InputPlan
from npugraph_ex.observe.logger import logger

MAX_CAPTURES_WITHOUT_HIT = 16
"""How many captures in a row new values of such scalars may cause while no captured value repeats."""


class ScalarChurn:
    """Counts the captures that one graph makes for new values of its scalars.

    Args:
        plan: says which scalars are in no tensor's shape.
        graph: the graph's number in `report.graphs`.

    Attributes:
        captures_without_hit: captures since a captured value was last used again. Each of these captures differs from an
            earlier one only in such scalars.
    """

    def __init__(self, plan: InputPlan, graph: int) -> None:
        self._plan = plan
        self._graph = graph
        self._has_warned = False
        self.captures_without_hit = 0

    def should_run_eagerly(self, key: GraphKey, known: CaptureCache) -> bool:
        """Whether a call that needs a new capture should run operator by operator.

        Args:
            key: the call's graph key.
            known: the keys that have captures.
        """
        scalars = self._plan.unshaped_scalars
        if not scalars:
            return False
        rest = self._without_scalars(key)
        similar = next((other for other in reversed(known) if self._without_scalars(other) == rest), None)
        if similar is None:
            return False
        self.captures_without_hit += 1
        if self.captures_without_hit <= MAX_CAPTURES_WITHOUT_HIT:
            return False
        if not self._has_warned:
            self._has_warned = True
            names = [name for index, name in scalars.items() if key.numbers[index] != similar.numbers[index]]
            logger.warning(
                "Graph %d was captured for %d values of %s in a row, none of which came again; for further new values it runs "
                "operator by operator. Pass the number as a tensor on the device, which needs only one capture",
                self._graph,
                MAX_CAPTURES_WITHOUT_HIT + 1,
                ", ".join(names),
            )
        return True

    def _without_scalars(self, key: GraphKey) -> tuple[object, ...]:
        """A key without the scalars that may churn."""
        scalars = self._plan.unshaped_scalars
        return (*(number for index, number in enumerate(key.numbers) if index not in scalars), key.addresses)
