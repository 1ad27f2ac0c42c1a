"""The happens-before order of a graph with several streams: one vector clock for each stream.

Work on one stream runs in the order of the node list; a wait adds an edge from each of its records, and a wait for an
asynchronous collective adds one from the collective's start. The order of the host adds no edge. `Order` answers for a
finished graph; `Clocks` is for a walk through a graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import fx

from npugraph_ex.graph.collectives import awaited_by
from npugraph_ex.graph.streams.events import MAIN, allocates, awaited, is_record, is_record_stream, is_wait, stream_of

Clock = Mapping[str, int]
"""Stream -> the number of its last step that is known to be over."""


class Moment(NamedTuple):
    """One step of one stream, and all work that is over after it."""

    stream: str
    number: int
    clock: Clock


BEGIN = Moment(MAIN, 1, {MAIN: 1})
"""The main stream's first step: the inputs are ready."""


class Clocks:
    """The work that each stream knows to be over, during a walk through a graph in list order."""

    def __init__(self) -> None:
        self._known: dict[str, dict[str, int]] = {MAIN: dict(BEGIN.clock)}

    def now(self, stream: str) -> Moment:
        """The work that is over once ``stream`` has finished its work so far."""
        known = self._known.setdefault(stream, {})
        return Moment(stream, known.get(stream, 0), dict(known))

    def step(self, stream: str) -> Moment:
        """Add a step to ``stream``."""
        known = self._known.setdefault(stream, {})
        known[stream] = known.get(stream, 0) + 1
        return Moment(stream, known[stream], dict(known))

    def learn(self, stream: str, clock: Clock) -> None:
        """Order everything in ``clock`` before the next work of ``stream``."""
        known = self._known.setdefault(stream, {})
        for other, number in clock.items():
            if known.get(other, 0) < number:
                known[other] = number

    def knows(self, stream: str, moment: Moment) -> bool:
        """Whether ``moment`` is over before the next work of ``stream``."""
        return self._known.setdefault(stream, {}).get(moment.stream, 0) >= moment.number

    def knows_all(self, stream: str, clock: Clock) -> bool:
        """Whether everything in ``clock`` is over before the next work of ``stream``."""
        known = self._known.setdefault(stream, {})
        return all(known.get(other, 0) >= number for other, number in clock.items())


class Order:
    """The execution order of a graph in its present state.

    Args:
        graph: labelled, with ``record`` and ``wait`` nodes as in `events`.
    """

    def __init__(self, graph: fx.Graph) -> None:
        clocks = Clocks()
        self._moments: dict[fx.Node, Moment] = {}
        for node in graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self._moments[node] = BEGIN
            elif is_record(node) or allocates(node):
                self._moments[node] = clocks.now(stream_of(node))
            elif not is_record_stream(node):
                stream = MAIN if node.op == "output" else stream_of(node)
                for event in awaited(node) if is_wait(node) else ():
                    clocks.learn(stream, self._moments[event].clock)
                collective = awaited_by(node)
                if collective is not None:
                    clocks.learn(stream, self._moments[collective].clock)
                self._moments[node] = clocks.step(stream)

    def proves(self, first: fx.Node, second: fx.Node) -> bool:
        """Whether ``first`` is over before ``second`` starts, on every schedule."""
        before, after = self._moments[first], self._moments[second]
        return first is not second and after.clock.get(before.stream, 0) >= before.number
