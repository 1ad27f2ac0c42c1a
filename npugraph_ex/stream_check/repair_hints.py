"""The text of findings: what a node does, and the line that repairs the fault in the API that the program uses."""

from __future__ import annotations

import ast
from itertools import chain, count

from torch import fx

from npugraph_ex.graph.source import source_line
from npugraph_ex.graph.streams.events import MAIN, MARK, TAG, is_record, stream_of
from npugraph_ex.graph.streams.ops import RECORDS, TAGGED_RECORDS, argument
from npugraph_ex.graph.written_calls import calls_at, function_at, names_of
from npugraph_ex.report.findings import Location, stream_name
from npugraph_ex.stream_check.accesses import Touch

_NATIVE, NATIVE_EVENT = "torch.npu.Stream ", "torch.npu.Event "
"""The prefixes of labels of streams and of tags of events that the program made with ``torch.npu``."""


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
        self._records = records
        self._named: set[str] = set()
        self._namespace = getattr(records[0].target, "namespace", "npugraph_ex") if records else "npugraph_ex"
        self._is_native = any(stream_of(node).startswith(_NATIVE) for node in graph.nodes)
        self._is_pass = bool(records) and not self._is_native and not any(TAG in record.meta for record in records)

    def missing(self, first: fx.Node, second: fx.Node, record: fx.Node | None) -> str:
        """The lines that make ``second`` wait for ``first``; only the wait if ``record`` exists and has a name there."""
        wait = None if record is None else self._known_wait(record, second)
        name = "" if wait else self._new_name(first, second)
        there = f"before {at(second)} add `{wait or self._wait(name)}` on {stream_name(_stream(second))}"
        if wait:
            return there
        return f"after {at(first)} add `{self._record(name)}` on {stream_name(_stream(first))}, and {there}"

    def fork(self, node: fx.Node) -> str:
        """The lines that make a stream's first work wait for the main stream."""
        name = self._new_name(node)
        on_main = f"before {at(node)} add `{self._record(name)}` on the main stream"
        return f"{on_main}, and after it `{self._wait(name)}` on {stream_name(_stream(node))}"

    def superfluous(self, wait: fx.Node) -> str:
        """The advice for a wait that orders nothing."""
        return f"remove the wait at {at(wait)}, or move it to where it should order something"

    def unrecorded(self, wait: fx.Node) -> str:
        """The line that records what a wait without any event should wait for."""
        record, waiting = self._record(self._new_name(wait)), stream_name(_stream(wait))
        return (
            f"before {at(wait)} add `{record}` on the stream that {waiting} should wait for and name it in the wait, or remove "
            "the wait"
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

    def _known_wait(self, record: fx.Node, use: fx.Node) -> str | None:
        """The wait at ``use`` for the event of a record; None if no variable is it there, or is another by then."""
        if self._is_pass:
            return self._wait(record.name)
        if not self._is_native:
            return tagged(record, "wait")
        name, function = _variable(record)
        later = (other for other in self._records if record < other < use)
        lost = function is not function_at(source_line(use)) or any(_variable(other)[0] == name for other in later)
        return None if lost or name is None else self._wait(name)

    def _new_name(self, *nodes: fx.Node) -> str:
        """A name of a new event that the source does not use around the nodes, and no other repair uses."""
        taken = self._named.union(*(names_of(function_at(source_line(node))) for node in nodes))
        word = "record" if self._is_pass else "event"
        names = chain([word], (f"{word}_{number}" for number in count(2)))
        name = next(one for one in names if one not in taken)
        self._named.add(name)
        return name

    def _record(self, name: str) -> str:
        if self._is_native:
            return f"{name} = torch.npu.current_stream().record_event()"
        if self._is_pass:
            return f"{name} = graph.call_function(torch.ops.{self._namespace}.record.default)"
        return f"npugraph_ex.ops.npu_tagged_event_record({name})"

    def _wait(self, name: str) -> str:
        if self._is_native:
            return f"torch.npu.current_stream().wait_event({name})"
        if self._is_pass:
            return f"graph.call_function(torch.ops.{self._namespace}.wait.default, ([{name}],))"
        return f"npugraph_ex.ops.npu_tagged_event_wait({name})"


def _variable(record: fx.Node) -> tuple[str | None, ast.AST | None]:
    """The variable of the event that a line records, if it has one and records no other, and the function of the line."""
    found: dict[str | None, ast.AST] = {}
    for written in calls_at(source_line(record)):
        call = written.call
        if not isinstance(call.func, ast.Attribute):
            continue
        event: ast.expr | None
        if call.func.attr == "record":
            event = call.func.value
        elif call.func.attr == "record_event":
            given = [*call.args, *(one.value for one in call.keywords)]
            made = written.statement
            assigned = made.targets[0] if isinstance(made, ast.Assign) and made.value is call else None
            event = given[0] if given else assigned
        else:
            continue
        named = isinstance(event, (ast.Name, ast.Attribute)) and "(" not in (text := ast.unparse(event))
        found[text if named else None] = written.function
    return next(iter(found.items())) if len(found) == 1 else (None, None)


def tagged(node: fx.Node, verb: str) -> str:
    """A record of, or a wait for, a node's event, in the program's own form: a tagged event, or one of ``torch.npu``.

    Args:
        node: a record or a wait.
        verb: "record" or "wait".
    """
    own = "npu_tagged_event_record" if node.target in (*RECORDS, *TAGGED_RECORDS) else "npu_tagged_event_wait"
    lines = [calls for line in (node.meta.get("stack_trace") or "").splitlines() if (calls := _calls_of(own, line))]
    if lines and len(lines[-1]) == 1:
        return lines[-1][0].replace(own, f"npu_tagged_event_{verb}", 1)
    tag = node.meta.get(TAG) or argument(node, 0, "tag", "")
    if tag.startswith(NATIVE_EVENT):
        name, _ = _variable(node)
        return f"torch.npu.current_stream().{verb}_event({name or '<the event>'})"
    return f"npugraph_ex.ops.npu_tagged_event_{verb}(<the event with tag {tag!r}>)"


def _calls_of(name: str, line: str) -> list[str]:
    """The calls of a function in a line of source, which may hold other statements too."""
    try:
        tree = ast.parse(line.strip())
    except SyntaxError:
        return []
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [ast.unparse(call) for call in calls if ast.unparse(call.func).rpartition(".")[2] == name]
