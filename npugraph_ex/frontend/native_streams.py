"""Native `torch.npu` streams and events in a Dynamo graph become this library's scopes and tagged events, before AOT.

Dynamo annotates each node with the stream of the `with` block around it and traces waits and records as operators that take
numbers of stream and event objects. AOT would wrap those operators and move them; as scopes and events they keep their
place. The stream that is current where the graph is called is the main one; each other stream object is one tag.

Inside, the graph runs on streams of its own. To the code around it the user's objects mean what they mean in eager mode:
the call comes after the work that their streams were given before, and work that they are given later comes after the call.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx

from npugraph_ex import _torch_private
from npugraph_ex.errors import ScopeError
from npugraph_ex.observe.report import source_line
from npugraph_ex.streams.labels import MAIN, STREAM
from npugraph_ex.streams.ops import ENTERS, EXITS

_streams = torch.ops.streams
_ours = torch.ops.npugraph_ex


@dataclass(frozen=True)
class NativeObjects:
    """The user's stream and event objects of one graph, by the numbers under which Dynamo finds them at each call.

    Attributes:
        streams: number -> label; the label of the main stream is empty.
        given: those of the streams that the graph did not make itself.
        recorded: numbers of the events that the graph records.
        awaited: numbers of the events that the graph awaits before it records them.
    """

    streams: dict[int, str]
    given: tuple[int, ...]
    recorded: tuple[int, ...]
    awaited: tuple[int, ...]


@dataclass
class _Lowering:
    """The rewrite of one Dynamo graph."""

    graph: fx.Graph
    labels: dict[int, str] = field(default_factory=dict)
    event_tags: dict[int, str] = field(default_factory=dict)
    recorded: dict[int, None] = field(default_factory=dict)
    awaited: dict[int, None] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def run(self) -> NativeObjects:
        self._refuse_set_stream()
        self._name_streams()
        places = [(node, self._label_at(node)) for node in self.graph.nodes]
        self._enclose(places)
        for node in list(self.graph.nodes):
            self._lower(node)
        for node in reversed(list(self.graph.nodes)):
            if _is_left_over(node) and not node.users:
                self.graph.erase_node(node)
            elif _annotated(node) is not None:  # or AOT would give the backward graph streams and events of its own
                node.meta["custom"] = {key: value for key, value in node.meta["custom"].items() if key != "stream"}
        given = tuple(number for number in self.labels if not _torch_private.was_made_while_tracing(number))
        return NativeObjects(self.labels, given, tuple(self.recorded), tuple(self.awaited))

    def _refuse_set_stream(self) -> None:
        """`with torch.npu.stream(s)` leaves a `set_stream` to enter and one to leave; more are the user's own."""
        enters = [node for node in self.graph.nodes if _is_context(node, "set_stream")]
        leaves = [node for node in enters if _is_context(node.args[0], "current_stream")]
        if len(enters) != 2 * len(leaves):
            raise ScopeError(
                f"{source_line(enters[0])}: torch.npu.set_stream inside compiled code changes the stream of code that is not "
                "compiled with it; write `with torch.npu.stream(s):` instead"
            )

    def _name_streams(self) -> None:
        """Give every stream that the graph mentions a label, equal streams the same."""
        known = {_identity(_torch_private.traced_object(_torch_private.CURRENT_STREAM)): MAIN}
        for node in self.graph.nodes:
            for number in _mentioned(node):
                stream = _identity(_torch_private.traced_object(number))
                self.labels[number] = known.setdefault(stream, f"torch.npu.Stream {len(known)}")

    def _label_at(self, node: fx.Node) -> str:
        """The stream on which a node stands: the one of its `with` block, or the one that it is about."""
        if node.target is _streams.wait_stream or _is_host_wait(node):
            return MAIN  # becomes events on several streams, each in a scope of its own
        number: object = _annotated(node)
        if node.target in (_streams.record_event, _streams.wait_event):
            number = node.args[1]
        return self.labels.get(number, MAIN) if isinstance(number, int) else MAIN

    def _enclose(self, places: Sequence[tuple[fx.Node, str]]) -> None:
        """Enclose runs of nodes of one stream. A run ends where another scope begins or ends, so that all stay nested."""
        current = MAIN
        for node, label in places:
            if node.op in ("placeholder", "get_attr") or _is_left_over(node):
                continue
            wanted = MAIN if node.op == "output" or _is_scope(node) else label
            if wanted == current:
                continue
            with self.graph.inserting_before(node):
                if current != MAIN:
                    self.graph.call_function(EXITS[0])
                if wanted != MAIN:
                    self.graph.call_function(ENTERS[0], ([STREAM], [wanted]))
            current = wanted

    def _lower(self, node: fx.Node) -> None:
        """Replace one operator on streams or events."""
        arguments: Any = node.args
        if node.target is _streams.record_event:
            self.recorded[arguments[0]] = None
            self._replace(node, [(_ours.tagged_event_record, (self._tag(arguments[0]),))])
        elif node.target is _streams.wait_event:
            if arguments[0] not in self.recorded:
                self.awaited[arguments[0]] = None  # recorded before the call, if at all: see `around`
                self._replace(node, [])
            else:
                self._replace(node, [(_ours.tagged_event_wait, (self._tag(arguments[0]),))])
        elif node.target is _streams.wait_stream:
            waiting, awaited = (self.labels[number] for number in arguments)
            self._order(node, [awaited], [waiting])
        elif node.target is _streams.record_stream:
            self._replace(node, [(_ours.record_stream, (arguments[0], self.labels[arguments[1]]))])
        elif _is_host_wait(node):
            self._synchronise(node)
        elif node.op == "call_method" and node.target == "query" and _is_left_over(arguments[0]):
            raise ScopeError(
                f"{source_line(node)} asks whether a stream or event is done: inside compiled code no host is there to ask. "
                "Move the query out of the compiled function"
            )

    def _synchronise(self, node: fx.Node) -> None:
        """The host waits, and launches nothing until then: so everything after it comes after what it waits for."""
        arguments: Any = node.args
        everything = [MAIN, *dict.fromkeys(label for label in self.labels.values() if label != MAIN)]
        if _is_device_wide(node):
            self._order(node, everything, everything)
        elif node.target is _streams.synchronize_stream:
            self._order(node, [self.labels[arguments[0]]], everything)
        elif arguments[0] in self.recorded:
            calls = [self._on(label, _ours.tagged_event_wait, self._tag(arguments[0])) for label in everything]
            self._replace(node, [call for group in calls for call in group])
        else:
            self.awaited[arguments[0]] = None
            self._replace(node, [])

    def _order(self, node: fx.Node, first: Sequence[str], then: Sequence[str]) -> None:
        """Replace a node by events that make some streams wait for others."""
        calls: list[tuple[Any, tuple[Any, ...]]] = []
        tags = {label: f"{node.name} {next(self.numbers)}" for label in first}
        for label, tag in tags.items():
            calls += self._on(label, _ours.tagged_event_record, tag)
        for label in then:
            for other, tag in tags.items():
                if other != label:
                    calls += self._on(label, _ours.tagged_event_wait, tag)
        self._replace(node, calls)

    def _on(self, label: str, operator: Any, tag: str) -> list[tuple[Any, tuple[Any, ...]]]:
        """One call on the stream of a label; the place in the graph is outside of the scopes that this pass makes."""
        if label == MAIN:
            return [(operator, (tag,))]
        return [(ENTERS[0], ([STREAM], [label])), (operator, (tag,)), (EXITS[0], ())]

    def _tag(self, number: int) -> str:
        """The tag of an event object."""
        event = _torch_private.traced_object(number)
        return self.event_tags.setdefault(id(event), f"torch.npu.Event {len(self.event_tags) + 1}")

    def _replace(self, node: fx.Node, calls: Sequence[tuple[Any, tuple[Any, ...]]]) -> None:
        for user in list(node.users):  # nobody uses a result that is always None, but for what Dynamo itself left over
            self.graph.erase_node(user)
        with self.graph.inserting_before(node):
            for target, args in calls:
                new = self.graph.call_function(target, args)
                new.meta = {key: value for key, value in node.meta.items() if key not in {"val", "example_value"}}
        self.graph.erase_node(node)


def _annotated(node: fx.Node) -> int | None:
    """The number of the stream of the `with` block in which a node was traced."""
    number = (node.meta.get("custom") or {}).get("stream")
    return number if isinstance(number, int) else None


def _mentioned(node: fx.Node) -> list[int]:
    """The numbers of the streams that a node is about."""
    arguments: Any = node.args
    found = [number for number in (_annotated(node),) if number is not None]
    if node.target in (_streams.record_event, _streams.wait_event, _streams.record_stream):
        found.append(arguments[1])
    elif node.target is _streams.wait_stream:
        found += arguments
    elif node.target is _streams.synchronize_stream:
        found.append(arguments[0])
    return found


def _is_context(node: object, name: str) -> bool:
    """Whether a node calls torch_npu's function of that name."""
    target = node.target if isinstance(node, fx.Node) and node.op == "call_function" else None
    return getattr(target, "__name__", "") == name and (getattr(target, "__module__", "") or "").startswith("torch_npu")


def _is_left_over(node: object) -> bool:
    """Whether a node only fetches a stream or event object, or makes one current: annotations say the same."""
    fetches = isinstance(node, fx.Node) and node.op == "call_function" and _torch_private.fetches_traced_object(node)
    return fetches or _is_context(node, "current_stream") or _is_context(node, "set_stream")


def _is_host_wait(node: fx.Node) -> bool:
    return node.target in (_streams.synchronize_event, _streams.synchronize_stream) or _is_device_wide(node)


def _is_device_wide(node: fx.Node) -> bool:
    return node.target is _streams.synchronize_device or _is_context(node, "synchronize")


def _is_scope(node: fx.Node) -> bool:
    packet = getattr(node.target, "overloadpacket", node.target)
    return any(packet is operator.overloadpacket for operator in (*ENTERS, *EXITS))


def lower(gm: fx.GraphModule) -> Callable[[Callable[..., Any]], Callable[..., Any]] | None:
    """Rewrite a Dynamo graph in place.

    Returns:
        What to put around the compiled graph, see `around`; None where the graph uses no native stream and no event.

    Raises:
        ScopeError: the graph does what has no meaning inside compiled code: ask whether a stream is done, or set it for good.
    """
    if not any(_annotated(node) is not None or _is_left_over(node) or _is_native(node) for node in gm.graph.nodes):
        return None
    original = fx.GraphModule(gm, copy.deepcopy(gm.graph))
    objects = _Lowering(gm.graph).run()
    gm.graph.lint()
    gm.recompile()
    return partial(around, original=original, objects=objects)


def _is_native(node: fx.Node) -> bool:
    packet = getattr(node.target, "overloadpacket", node.target)
    return (isinstance(packet, torch._ops.OpOverloadPacket) and str(packet).startswith("streams.")) or _is_device_wide(
        node
    )


def around(compiled: Callable[..., Any], original: Callable[..., Any], objects: NativeObjects) -> Callable[..., Any]:
    """The compiled graph, ordered with what the code around it does on the streams and events that it uses.

    Args:
        compiled: the graph, which runs on streams of its own beside the current one.
        original: the same as Dynamo traced it, which runs on the user's streams; called where two streams that were two
            when the graph was compiled are one now, or the other way round.
        objects: what the graph uses.
    """
    numbers = tuple(objects.streams)
    pattern = _pattern([MAIN, *objects.streams.values()])
    sides = tuple(number for number in numbers if objects.streams[number] != MAIN)

    def run(*args: Any) -> Any:
        current = torch.npu.current_stream()
        streams = {number: _as_npu(_torch_private.traced_object(number)) for number in numbers}
        if _pattern([_identity(current), *map(_identity, streams.values())]) != pattern:
            _torch_private.set_current_stream(current)
            return original(*args)
        recorded = [_torch_private.traced_object(number) for number in objects.recorded]
        for number in objects.awaited:
            current.wait_event(_torch_private.traced_object(number))
        for number in sides:
            if number in objects.given:
                current.wait_stream(streams[number])
        result = compiled(*args)
        for event in recorded:
            event.record(current)
        for number in sides:
            streams[number].wait_stream(current)
        return result

    return run


def _as_npu(stream: Any) -> torch.npu.Stream:
    """A stream as torch_npu's class: Dynamo's current stream, and `torch.Stream(...)`, are of torch's own."""
    return torch.npu.Stream(
        stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
    )


def _identity(stream: Any) -> tuple[int, int]:
    """What two objects of one stream share, whatever their class."""
    return stream.device_index, stream.stream_id


def _pattern(things: Sequence[Any]) -> tuple[int, ...]:
    """Of each thing, the first place that has an equal one."""
    return tuple(things.index(thing) for thing in things)
