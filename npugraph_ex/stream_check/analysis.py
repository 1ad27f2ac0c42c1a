"""The stream check: whether a graph's events enforce every order on which its results depend.

It walks the nodes in list order, which is the program's intended order. Each stream has a vector clock. The walk compares a
node's accesses with earlier accesses to the same bytes that are not known to be over. If two conflict, it reports the missing
edge and continues as if the edge were there. So each finding is one edge, and a graph with all these edges has no findings.

Functional forms of writes add dependences that the program before functionalization (`restored`) does not have. These become
notes, and the compiler always inserts their edges. So a conflict is an error if both have it, the program and the graph, and no
event orders it, the inserted ones included. A race that only the program has, because a functional write has memory of its own,
cannot change a result of the graph: eager mode has it, and no finding is about it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from dataclasses import replace
from typing import NamedTuple

from torch import fx

from npugraph_ex.graph.collectives import awaited_by, is_asynchronous
from npugraph_ex.graph.memory.aliases import AliasFacts, output_values
from npugraph_ex.graph.streams.events import (
    MAIN,
    MARK,
    allocates,
    awaited,
    begin,
    is_record,
    is_record_stream,
    is_wait,
    stream_of,
)
from npugraph_ex.graph.streams.ops import argument
from npugraph_ex.graph.streams.order import BEGIN, Clocks, Moment
from npugraph_ex.report.findings import Code, Finding, Findings, stream_name
from npugraph_ex.stream_check.accesses import Past, Touch, Touches, TouchHistory, works
from npugraph_ex.stream_check.allocations import Allocations
from npugraph_ex.stream_check.repair_hints import RepairHints, doing, location, verb
from npugraph_ex.stream_check.restored import Restored


def analyse(graph: fx.Graph, *, idle_waits_go: bool = False, streams_are_ours: bool = False) -> Findings:
    """Find the faults in the order of streams in ``graph``.

    Args:
        graph: labelled, with ``record``, ``wait`` and ``record_stream`` nodes as in `events`, and fake tensors in
            ``meta["val"]``. It is not changed.
        idle_waits_go: whether a later pass drops waits after the last work of their stream, so that no join is needed.
        streams_are_ours: whether a pass put all work on its streams, and none of the program's lines did. The order of that work
            is then the graph's own; in the program before functionalization it would be a race.

    Returns:
        The findings in graph order; none for a graph on one stream.
    """
    walk = _StreamAnalysis(graph, idle_waits_go=idle_waits_go, streams_are_ours=streams_are_ours)
    for node in graph.nodes:
        walk.visit(node)
    return Findings(tuple(_behind_repairs(finding, walk.found) for finding in walk.found))


def _behind_repairs(finding: Finding, found: list[Finding]) -> Finding:
    """A wait that orders nothing may be the one that is at the wrong place: the faults of its stream are repaired first."""
    if finding.code is not Code.WAIT_ORDERS_NOTHING or finding.second is None:
        return finding
    stream = finding.second.stream
    faults = [one for one in found if one.level == "error"]
    lacking = next(
        (one for one in faults if stream in {place.stream for place in (one.first, one.second) if place}), None
    )
    if lacking is None:
        return finding
    return replace(
        finding,
        repair=f"first repair what is missing, {lacking.missing_edge}; if this is still reported, {finding.repair}",
    )


class _StreamAnalysis:
    """One graph, node by node."""

    def __init__(self, graph: fx.Graph, *, idle_waits_go: bool, streams_are_ours: bool) -> None:
        self.found: list[Finding] = []
        self._idle_waits_go = idle_waits_go
        self._facts = AliasFacts(graph)
        self._clocks = Clocks()  # with every missing edge that was found, and every edge that the compiler inserts
        self._as_it_is = Clocks()  # without these edges: the order from the graph's own events
        self._enforced = Clocks()  # without the missing edges
        self._touches = Touches(self._facts)
        self._restored = Restored(fx.Graph() if streams_are_ours else graph)
        self._history = TouchHistory()  # of the program before functionalization
        self._graphs_history = TouchHistory()  # of the graph itself, if that differs
        self._moments: dict[fx.Node, Moment] = {}  # of the nodes in it, by `_clocks`
        self._allocations = Allocations(graph, self._facts)
        self._spelling = RepairHints(graph)
        start = begin(graph)
        self._begin = replace(location(start if start.op != "root" else start.next), does="the graph begins")
        self._records: dict[fx.Node, _Moments] = {}
        self._collectives: dict[fx.Node, _Moments] = {}  # the records for which a wait may still come
        self._records_on: dict[str, list[fx.Node]] = defaultdict(list)
        self._last: dict[str, tuple[fx.Node, Moment]] = {}
        self._waits_at_end: dict[str, list[fx.Node]] = {}  # the last nodes of their streams so far

    def visit(self, node: fx.Node) -> None:
        """Process one node."""
        if is_record(node):
            self._record(node)
        elif is_wait(node):
            self._wait(node)
        elif is_record_stream(node):
            self._allocations.record_stream(argument(node, 0, "tensor"), argument(node, 1, "stream"))
        elif node.op == "output":
            self._end(node)
        elif works(node):
            self._work(node)

    def _record(self, node: fx.Node) -> None:
        stream = stream_of(node)
        self._records[node] = self._now(stream)
        self._records_on[stream].append(node)
        self._waits_at_end.pop(stream, None)

    def _wait(self, node: fx.Node) -> None:
        stream, events = stream_of(node), awaited(node)
        if not events:
            text = f"{node.name} waits for an event that was not recorded before it"
            edge, repair = f"a record before {node.name}", self._spelling.unrecorded(node)
            self.found.append(Finding(Code.WAIT_WITHOUT_RECORD, text, location(node), None, edge, repair))
        elif all(self._as_it_is.knows_all(stream, self._records[event].as_it_is.clock) for event in events):
            self._superfluous(node, "its work is over in any case")
        else:
            self._waits_at_end.setdefault(stream, []).append(node)
        for event in events:
            self._learn(stream, self._records[event])
        if self._idle_waits_go:
            self._as_it_is.step(stream)
        else:
            self._last[stream] = node, self._step(stream).known

    def _now(self, stream: str) -> _Moments:
        return _Moments(self._clocks.now(stream), self._as_it_is.now(stream), self._enforced.now(stream))

    def _step(self, stream: str) -> _Moments:
        return _Moments(self._clocks.step(stream), self._as_it_is.step(stream), self._enforced.step(stream))

    def _learn(self, stream: str, over: _Moments) -> None:
        self._clocks.learn(stream, over.known.clock)
        self._as_it_is.learn(stream, over.as_it_is.clock)
        self._enforced.learn(stream, over.enforced.clock)

    def _superfluous(self, node: fx.Node, reason: str) -> None:
        if MARK in node.meta:
            return  # the compiler wrote it
        text, edge = f"{node.name} orders nothing: {reason}", f"none: {reason}"
        record, repair = max(awaited(node)), self._spelling.superfluous(node)
        self.found.append(Finding(Code.WAIT_ORDERS_NOTHING, text, location(record), location(node), edge, repair))

    def _work(self, node: fx.Node) -> None:
        stream = stream_of(node)
        self._waits_at_end.pop(stream, None)
        collective = awaited_by(node)
        if collective is not None:  # the device orders the two, whatever their streams
            self._learn(stream, self._collectives[collective])
        if not self._clocks.knows(stream, BEGIN):
            self._never_forked(node, stream)
        touched = self._touches.of(node)
        meant = self._restored.of(node) if self._restored else touched
        self._races(node, stream, meant, self._made_dependent(node, stream, touched, meant) if self._restored else None)
        for touch in touched:
            if touch.fresh:
                for value, use in self._allocations.reused(node, touch, stream, self._clocks):
                    self._reused(node, stream, value, use)
        now = self._now(stream) if allocates(node) else self._step(stream)
        if not allocates(node):
            self._last[stream] = node, now.known
        if is_asynchronous(node):
            self._collectives[node] = now
        self._note(node, now, touched, meant)

    def _note(self, node: fx.Node, now: _Moments, touched: list[Touch], meant: list[Touch]) -> None:
        """Add a node's touches, in the graph and in the program."""
        for touch in meant:
            self._history.note(node, touch, now.known)
        if self._restored:
            self._moments[node] = now.known
            for touch in touched:
                self._graphs_history.note(node, touch, now.enforced)
        for touch in touched:
            if touch.fresh:
                self._allocations.allocated(node, touch, now.known.stream)
            else:
                self._allocations.used(Past(node, touch, now.known))

    def _made_dependent(self, node: fx.Node, stream: str, touched: list[Touch], meant: list[Touch]) -> set[fx.Node]:
        """Note each edge that ``node`` needs in the graph and not in the program. Return the nodes that no event puts before it."""
        own = {past.node for touch in meant for past in self._history.conflicting(touch)}
        needed = {
            past.node: _Edge(past.node, past.moment, node, past.touch, touch)
            for touch in touched
            for past in self._graphs_history.conflicting(touch)
            if not self._enforced.knows(stream, past.moment)
        }
        for latest in sorted(needed, reverse=True):
            edge = needed[latest]
            if latest in own or self._enforced.knows(stream, edge.moment):
                continue
            text = f"{node.name} depends on {latest.name} only because writes in place have a functional form"
            record = self._record_after(edge.moment)
            self.found.append(
                self._lacking(Code.MADE_DEPENDENT, text, edge, record, "none: the compiler inserts the event")
            )
            if record is None:
                self._enforced.learn(stream, edge.moment.clock)
                self._clocks.learn(stream, self._moments[latest].clock)
            else:
                self._enforced.learn(stream, self._records[record].enforced.clock)
                self._clocks.learn(stream, self._records[record].known.clock)
        return {*needed}

    def _races(self, node: fx.Node, stream: str, touched: list[Touch], among: set[fx.Node] | None) -> None:
        """Report each edge that ``node`` lacks, ``among`` some nodes; the latest first, because it may imply the earlier ones."""
        conflicts = [
            (past, touch)
            for touch in touched
            for past in self._history.conflicting(touch)
            if (among is None or past.node in among) and not self._clocks.knows(stream, past.moment)
        ]
        for latest in sorted({past.node for past, _ in conflicts}, reverse=True):
            pairs = [(past, touch) for past, touch in conflicts if past.node is latest]
            if not self._clocks.knows(stream, pairs[0][0].moment):
                code, past, touch = min(
                    ((_kind(*pair), *pair) for pair in pairs), key=lambda found: _SEVERITY[found[0]]
                )
                text = f"{node.name} {verb(touch)} while {latest.name} may still be {doing(past.touch)}"
                self._missing(code, text, _Edge(latest, past.moment, node, past.touch, touch))

    def _never_forked(self, node: fx.Node, stream: str) -> None:
        text = f"{node.name} is the first work on {stream_name(stream)}, which waits for nothing on the main stream"
        edge, repair = f"the graph's begin before {node.name}", self._spelling.fork(node)
        self.found.append(
            Finding(Code.NEVER_FORKED, text, self._begin, location(node), edge, repair, wait_before=node.name)
        )
        self._clocks.learn(stream, BEGIN.clock)

    def _missing(self, code: Code, text: str, edge: _Edge) -> None:
        """Report an edge that the graph lacks, and go on as if it had it."""
        record = self._record_after(edge.moment)
        repair = self._spelling.missing(edge.first, edge.second, record)
        self.found.append(self._lacking(code, text, edge, record, repair))
        clock = edge.moment.clock if record is None else self._records[record].known.clock
        self._clocks.learn(MAIN if edge.second.op == "output" else stream_of(edge.second), clock)

    def _lacking(self, code: Code, text: str, edge: _Edge, record: fx.Node | None, repair: str) -> Finding:
        """A finding about a missing edge that can use ``record``."""
        first, second = location(edge.first, edge.first_touch), location(edge.second, edge.second_touch)
        return Finding(
            code,
            f"{text}: {stream_name(second.stream)} does not wait for {stream_name(first.stream)} there",
            first,
            second,
            f"{first.node} before {second.node}",
            repair,
            record_after=first.node if record is None else "",
            record=record.name if record is not None else "",
            wait_before=second.node,
        )

    def _record_after(self, step: Moment) -> fx.Node | None:
        """A record for the missing edge: right after ``step`` on its stream, or the next one there without a wait."""
        records = self._records_on[step.stream]
        index = bisect_left(records, step.number, key=lambda record: self._records[record].known.number)
        if index == len(records):
            return None
        record = records[index]
        return record if self._records[record].known.number == step.number or not record.users else None

    def _reused(self, node: fx.Node, stream: str, value: fx.Node, use: Past) -> None:
        other = use.moment.stream
        text = (
            f"{node.name} may get the memory of {value.name}, which {stream_name(stream)} has freed, while "
            f"{use.node.name} on {stream_name(other)} may still be {doing(use.touch)}"
        )
        first, second = location(use.node, use.touch), location(node)
        self.found.append(
            Finding(Code.MEMORY_REUSED, text, first, second, f"{first.node} before {second.node}",
                    self._spelling.lifetime(value, use.node, other), keep_alive=use.touch.value.name)
        )  # fmt: skip

    def _end(self, output: fx.Node) -> None:
        """Every stream must be known to be over when the graph ends."""
        for stream, waits in self._waits_at_end.items():
            for wait in waits if stream != MAIN else ():
                self._superfluous(wait, f"nothing runs on {stream_name(stream)} after it")
        outputs = [node for node in output_values(output.graph) if isinstance(node, fx.Node)]
        inputs = output.graph.find_nodes(op="placeholder")
        for stream, (last, moment) in sorted(self._last.items(), key=lambda item: item[1][0], reverse=True):
            if self._clocks.knows(MAIN, moment):
                continue
            code, text = self._what_is_lost(outputs, inputs, stream)
            text = text or f"{last.name} may still run when the graph ends"
            self._missing(code, text, _Edge(last, moment, output))

    def _what_is_lost(self, outputs: list[fx.Node], inputs: list[fx.Node], stream: str) -> tuple[Code, str]:
        """The fault if the graph ends before ``stream`` is over; the text is empty if no value is affected."""
        writer = self._unordered_writer(outputs, stream)
        if writer is not None:
            return Code.OUTPUT_UNORDERED, f"{writer.name} computes an output, and the graph may end before it is over"
        writer = self._unordered_writer(inputs, stream)
        if writer is not None:
            return Code.WRITE_BACK_UNORDERED, f"{writer.name} writes an input, and the graph may end before it is over"
        return Code.NEVER_JOINED, ""

    def _unordered_writer(self, values: list[fx.Node], stream: str) -> fx.Node | None:
        """The latest node of ``stream`` that writes any of ``values`` and may not be over at the graph's end."""
        lies_in = self._restored.roots if self._restored else self._facts.roots
        roots = frozenset(root for value in values for root in lies_in(value))
        writers = [
            past.node
            for past in self._history.writers(roots)
            if past.moment.stream == stream and not self._clocks.knows(MAIN, past.moment)
        ]
        return max(writers, default=None)


class _Moments(NamedTuple):
    """One step of one stream, by each of the walk's clocks."""

    known: Moment
    as_it_is: Moment
    enforced: Moment


class _Edge(NamedTuple):
    """An order that a graph lacks: a step of one stream before a node of another."""

    first: fx.Node
    moment: Moment
    second: fx.Node
    first_touch: Touch | None = None
    second_touch: Touch | None = None


_SEVERITY = {Code.READ_AFTER_WRITE: 0, Code.WRITE_AFTER_WRITE: 1, Code.WRITE_AFTER_READ: 2}


def _kind(past: Past, touch: Touch) -> Code:
    """The kind of a conflict of two accesses."""
    if not touch.writes:
        return Code.READ_AFTER_WRITE
    return Code.WRITE_AFTER_WRITE if past.touch.writes else Code.WRITE_AFTER_READ
