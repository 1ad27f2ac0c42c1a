"""The text of findings: what a node does, and the line that repairs the fault in the API that the program uses."""

from __future__ import annotations

import re

from torch import fx

from npugraph_ex.graph.source import source_line
from npugraph_ex.graph.streams.events import MAIN, MARK, TAG, is_record, stream_of
from npugraph_ex.graph.streams.ops import argument
from npugraph_ex.report.findings import Location, stream_name
from npugraph_ex.stream_check.accesses import Touch

_NATIVE = "torch.npu.Stream "
"""The prefix of labels of streams that the program made with ``torch.npu.Stream``."""


def location(node: fx.Node, touch: Touch | None = None) -> Location:
    """One side of a finding; ``touch`` adds its access to memory."""
    does = ""
    if node.op.startswith("call_"):
        does = str(node.target) if touch is None else f"{node.target} {verb(touch)}"
    return Location(node.name, _stream(node) or None, does, source_line(node))


def verb(touch: Touch) -> str:
    """An access in words, such as "reads x"."""
    return f"{'writes' if touch.writes else 'reads'} {touch.value.name}"


def doing(touch: Touch) -> str:
    """An access in words, such as "reading x"."""
    if touch.fresh:
        return "computing it"
    return f"{'writing' if touch.writes else 'reading'} {touch.value.name}"


def _stream(node: fx.Node) -> str:
    return MAIN if node.op == "output" else stream_of(node)


def at(node: fx.Node) -> str:
    """A node's line, or its name if the graph does not know the line."""
    if node.op == "output":
        return "the graph's end"
    return source_line(node) or f"node {node.name}"


class RepairHints:
    """The repairs of one graph, written with tagged events, with native events, or as nodes that a pass inserts.

    Args:
        graph: its records show which API the program uses.
    """

    def __init__(self, graph: fx.Graph) -> None:
        records = [node for node in graph.nodes if is_record(node) and MARK not in node.meta]
        self._namespace = getattr(records[0].target, "namespace", "npugraph_ex") if records else "npugraph_ex"
        self._is_native = any(stream_of(node).startswith(_NATIVE) for node in graph.nodes)
        self._is_pass = bool(records) and not self._is_native and not any(TAG in record.meta for record in records)

    def missing(self, first: fx.Node, second: fx.Node, record: fx.Node | None) -> str:
        """The lines that make ``second`` wait for ``first``; only the wait if ``record`` exists."""
        wait = f"before {at(second)} add `{self._wait(record)}` on {stream_name(_stream(second))}"
        if record is not None:
            return wait
        return f"after {at(first)} add `{self._record()}` on {stream_name(_stream(first))}, and {wait}"

    def fork(self, node: fx.Node) -> str:
        """The lines that make a stream's first work wait for the main stream."""
        on_main = f"before {at(node)} add `{self._record()}` on the main stream"
        return f"{on_main}, and after it `{self._wait(None)}` on {stream_name(_stream(node))}"

    def superfluous(self, wait: fx.Node) -> str:
        """The advice for a wait that orders nothing."""
        return f"remove the wait at {at(wait)}, or move it to where it should order something"

    def unrecorded(self, wait: fx.Node) -> str:
        """The line that records what a wait without any event should wait for."""
        return (
            f"before {at(wait)} add `{self._record()}` on the stream that {stream_name(_stream(wait))} should wait for and "
            "name it in the wait, or remove the wait"
        )

    def lifetime(self, value: fx.Node, use: fx.Node, stream: str) -> str:
        """The line that keeps the memory of ``value`` from being reused while ``use`` runs."""
        name = stream_name(stream)
        if self._is_native:
            line = f"{value.name}.record_stream(torch.npu.current_stream())"
        elif self._is_pass or not stream:
            line = f"graph.call_function(torch.ops.{self._namespace}.record_stream.default, ({value.name}, {stream!r}))"
        else:
            line = f"npugraph_ex.ops.npu_record_tagged_stream({value.name}, {stream!r})"
        return f"after {at(use)} add `{line}` on {name}"

    def _record(self) -> str:
        if self._is_native:
            return "event = torch.npu.current_stream().record_event()"
        if self._is_pass:
            return f"record = graph.call_function(torch.ops.{self._namespace}.record.default)"
        return "npugraph_ex.ops.npu_tagged_event_record(event)"

    def _wait(self, record: fx.Node | None) -> str:
        if self._is_native:
            return "torch.npu.current_stream().wait_event(event)"
        if self._is_pass:
            name = record.name if record is not None else "record"
            return f"graph.call_function(torch.ops.{self._namespace}.wait.default, ([{name}],))"
        return tagged(record, "wait") if record is not None else "npugraph_ex.ops.npu_tagged_event_wait(event)"


_TAGGED = re.compile(r"^\s*([\w.]*npu_tagged_event_)(?:record|wait)(\(.*\))\s*(?:#.*)?$", re.MULTILINE)


def tagged(node: fx.Node, verb: str) -> str:
    """A record of, or a wait for, a node's tagged event, in the program's own form.

    Args:
        node: a record or a wait.
        verb: "record" or "wait".
    """
    written = _TAGGED.findall(node.meta.get("stack_trace") or "")
    if written:
        return verb.join(written[-1])
    tag = node.meta.get(TAG) or argument(node, 0, "tag", "")
    return f"npugraph_ex.ops.npu_tagged_event_{verb}(<the event with tag {tag!r}>)"
