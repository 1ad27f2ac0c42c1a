"""Lowers all forms of events to the one form that passes read: `record` nodes, and `wait` nodes with records as arguments.

`tagged_event_wait(tag)` waits for the latest earlier record of its event, in program order. A `wait` on tensors waits for the
nodes that compute them. Only here can the compiler see a program's mistakes with events, because in the result each wait has
its records. A mistake becomes a finding of the report.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from torch import fx

from npugraph_ex.errors import ScopeError
from npugraph_ex.graph.source import source_line
from npugraph_ex.graph.streams.events import (
    TAG,
    awaited,
    insert_record,
    is_record,
    is_wait,
    priorities,
    producers,
    stream_of,
)
from npugraph_ex.graph.streams.ops import RECORDS, TAGGED_RECORDS, TAGGED_WAITS, WAITS, argument
from npugraph_ex.passes.base import PassContext
from npugraph_ex.report.findings import Code, Finding
from npugraph_ex.stream_check.repair_hints import NATIVE_EVENT, at, location, tagged


@dataclass
class _Event:
    """A tagged event during the pass over a graph."""

    name: str
    record: fx.Node | None = None
    awaited: bool = True  # whether anything waited for the latest record


@dataclass
class _Lowering:
    """The pass over one graph."""

    graph: fx.Graph
    context: PassContext
    events: dict[str, _Event] = field(default_factory=dict)  # by tag

    to_come: dict[str, list[fx.Node]] = field(default_factory=lambda: defaultdict(list))  # records by tag

    def run(self) -> None:
        for node in self.graph.nodes:
            if node.target in TAGGED_RECORDS:
                self.to_come[argument(node, 0, "tag")].append(node)
        for node in list(self.graph.nodes):
            if node.target in TAGGED_RECORDS:
                self.to_come[argument(node, 0, "tag")].remove(node)
                self._record(node)
            elif node.target in TAGGED_WAITS:
                self._wait(node)
            elif is_wait(node):
                self._wait_for_producers(node)

    def _event(self, node: fx.Node) -> _Event:
        tag, name = argument(node, 0, "tag"), argument(node, 1, "event", "")
        event = self.events.setdefault(tag, _Event(name))
        node.meta[TAG] = tag
        if name and event.name and name != event.name:
            raise ScopeError(
                f"{described(node)} uses an event with the tag {tag!r}, and so does another event of the same graph; "
                "give each npu_create_tagged_event of a model a tag of its own"
            )
        event.name = event.name or name
        return event

    def _record(self, node: fx.Node) -> None:
        event = self._event(node)
        if event.record is not None and not event.awaited:
            tag = argument(node, 0, "tag")
            self.context.report.add_finding(
                Finding(
                    Code.RECORDED_TWICE,
                    f"Event {tag!r} is recorded again, and nothing waited for its first record",
                    location(event.record),
                    location(node),
                    f"a wait for event {tag!r} between {event.record.name} and {node.name}",
                    f"before {at(node)} add `{tagged(event.record, 'wait')}` where its first record is meant, or remove that "
                    f"record at {at(event.record)}",
                )
            )
        event.record, event.awaited = _replaced(self.graph, node, RECORDS[0], ()), False

    def _wait(self, node: fx.Node) -> None:
        event = self._event(node)
        if event.record is None:
            self.context.report.add_finding(self._without_record(node, argument(node, 0, "tag")))
            self.graph.erase_node(node)
            return
        event.awaited = True
        _replaced(self.graph, node, WAITS[0], ([event.record],))

    def _without_record(self, wait: fx.Node, tag: str) -> Finding:
        """A wait without an earlier record is wrong if a record follows; otherwise it may concern earlier work."""
        edge, later = f"a record of event {tag!r} before {wait.name}", self.to_come.get(tag)
        if later:
            text = f"Event {tag!r} is recorded only after this wait, which therefore waits for nothing"
            is_native = tag.startswith(NATIVE_EVENT)
            if is_native:  # and so may have been recorded by an earlier call
                text += " of this call; what an earlier one recorded is over without it"
            repair = (
                f"move `{tagged(later[0], 'record')}` from {at(later[0])} to before {at(wait)}, or the wait to after it"
            )
            code = Code.WAIT_FOR_OUTSIDE if is_native else Code.WAIT_WITHOUT_RECORD
            return Finding(code, text, location(wait), location(later[0]), edge, repair)
        text = (
            f"No line of this graph records event {tag!r}: work that was recorded before the graph began, as before a graph "
            "break, is over without the wait, and without such work the wait waits for nothing"
        )
        repair = (
            f"if the record was forgotten, add `{tagged(wait, 'record')}` on the stream to wait for, before {at(wait)}"
        )
        return Finding(Code.WAIT_FOR_OUTSIDE, text, location(wait), None, edge, repair)

    def _wait_for_producers(self, node: fx.Node) -> None:
        """Replace a wait on tensors by a wait on records, one after each node that computes a tensor."""
        records: dict[fx.Node, None] = {}
        for tensor in awaited(node):
            if is_record(tensor):
                records[tensor] = None
                continue
            for producer in producers(tensor):
                records[insert_record(self.graph, producer, stream_of(producer))] = None
        if not records:
            self.graph.erase_node(node)  # inputs of the graph are ready from the start
        elif tuple(records) != awaited(node):
            node.args, node.kwargs = (list(records),), {}


def _replaced(graph: fx.Graph, node: fx.Node, target: object, args: tuple[object, ...]) -> fx.Node:
    """Replace a node by a call on the same stream."""
    with graph.inserting_before(node):
        new = graph.call_function(target, args)  # type: ignore[arg-type]
    new.meta = {key: value for key, value in node.meta.items() if key not in {"val", "tensor_meta"}}
    graph.erase_node(node)
    return new


def described(node: fx.Node) -> str:
    """The node's name in errors."""
    source = source_line(node)
    return f"{node.name} ({source})" if source else node.name


def run(gm: fx.GraphModule, context: PassContext) -> None:
    """Lower all events of `gm.graph`.

    Raises:
        ScopeError: two events of the graph share a tag, or one stream has two priorities.
    """
    _Lowering(gm.graph, context).run()
    priorities(gm.graph)
