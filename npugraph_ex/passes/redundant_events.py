"""Drops events that order nothing: waits for work that is over anyway, and records that nothing waits for.

It must run last, because a later pass that adds work could need a dropped event. The order of execution does not change.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import fx

from npugraph_ex.graph.streams.events import MAIN, awaited, computes, is_record, is_wait, stream_of
from npugraph_ex.graph.streams.order import Clocks, Moment
from npugraph_ex.passes.base import PassContext


class _EventEdge(NamedTuple):
    """One event of one wait, and all work that is over once the event is."""

    wait: fx.Node
    record: fx.Node
    moment: Moment

    def implies(self, other: _EventEdge) -> bool:
        """Whether a wait for this event makes a wait for ``other`` unnecessary."""
        mine = self.moment.clock
        return all(mine.get(stream, 0) >= number for stream, number in other.moment.clock.items())


@dataclass
class _EventWalk:
    """One walk through a graph in the order of its list."""

    clocks: Clocks = field(default_factory=Clocks)
    recorded: dict[fx.Node, Moment] = field(default_factory=dict)
    pending: dict[str, list[_EventEdge]] = field(default_factory=dict)  # since the last work of the stream
    needed: set[tuple[fx.Node, fx.Node]] = field(default_factory=set)

    def over(self, graph: fx.Graph) -> None:
        for node in graph.nodes:
            stream = MAIN if node.op == "output" else stream_of(node)
            if is_wait(node):
                edges = [_EventEdge(node, record, self.recorded[record]) for record in awaited(node)]
                self.pending.setdefault(stream, []).extend(edges)
            elif is_record(node):
                self._settle(stream)
                self.recorded[node] = self.clocks.now(stream)
            elif computes(node) or node.op == "output":
                self._settle(stream)
                self.clocks.step(stream)

    def _settle(self, stream: str) -> None:
        """Decide, before the stream's next work, which of its events it has to wait for."""
        edges = [edge for edge in self.pending.pop(stream, ()) if not self.clocks.knows_all(stream, edge.moment.clock)]
        kept: list[_EventEdge] = []
        for edge in edges:
            if not any(other.implies(edge) for other in kept):
                kept = [other for other in kept if not edge.implies(other)] + [edge]
        for edge in kept:
            self.needed.add((edge.wait, edge.record))
            self.clocks.learn(stream, edge.moment.clock)


def run(gm: fx.GraphModule, context: PassContext) -> None:
    """Drop the events of `gm.graph` that order nothing, and report how many."""
    waits = records = 0
    while sum(dropped := _drop(gm.graph)):
        # A stream that lost its record may have waited only for that record. Such a wait would take the stream into a capture
        # that it never joins again.
        waits, records = waits + dropped[0], records + dropped[1]
    context.report.add_dropped_events(waits, records)


def _drop(graph: fx.Graph) -> tuple[int, int]:
    """Drop the events that order nothing, found in one walk; return the number of waits and of records."""
    walk = _EventWalk()
    walk.over(graph)
    waits = records = 0
    for node in [node for node in graph.nodes if is_wait(node)]:
        given = awaited(node)
        kept = [record for record in given if (node, record) in walk.needed]
        waits += len(given) - len(kept)
        if not kept:
            graph.erase_node(node)
        elif len(kept) < len(given):
            node.args, node.kwargs = (kept,), {}
    for node in [node for node in graph.nodes if is_record(node) and not node.users]:
        graph.erase_node(node)
        records += 1
    return waits, records
