"""Native `torch.npu` streams and events in a Dynamo graph become this library's scopes and tagged events, before AOT.

Dynamo annotates each node with the stream of the `with` block around it and traces waits and records as operators that take
numbers of stream and event objects. AOT would wrap those operators and move them; as scopes and events they keep their
place. The current stream of a call is the main stream; each other stream object is one tag.

The graph runs on its own streams. For the code around the call the user's objects behave as in eager mode: the call comes
after the earlier work of their streams, and their later work comes after the call.
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
from npugraph_ex.frontend.native_streams.calls import NativeObjects, around, as_traced, identity
from npugraph_ex.frontend.native_streams.core_limits import UNLIMITED, Limit, take_out
from npugraph_ex.frontend.native_streams.nodes import (
    SYNCHRONIZE_STREAM,
    annotated,
    has_work,
    is_context,
    is_device_wide,
    is_host_wait,
    is_left_over,
    is_query,
    is_scope,
    mentioned,
    names_streams,
    opens_scope,
    streams,
)
from npugraph_ex.graph.source import source_line
from npugraph_ex.graph.streams.labels import CUBE, MAIN, STREAM, VECTOR
from npugraph_ex.graph.streams.ops import ENTERS, EXITS, argument
from npugraph_ex.versions.recorded_streams import as_operators
from npugraph_ex.versions.stream_methods import REFUSED, untraced_method
from npugraph_ex.versions.traced_objects import traced_current_stream

_ours = torch.ops.npugraph_ex

_ScopeState = tuple[tuple[str, str], ...]
"""The keys and values of a scope; empty where none is needed."""


@dataclass
class _NativeLowering:
    """The rewrite of one Dynamo graph."""

    graph: fx.Graph
    labels: dict[int, str] = field(default_factory=dict)
    event_tags: dict[int, str] = field(default_factory=dict)
    recorded: dict[int, None] = field(default_factory=dict)
    awaited: dict[int, None] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def run(self) -> NativeObjects:
        self._refuse_untraced_methods()
        self._refuse_set_stream()
        self._name_streams()
        limits = take_out(self.graph, self._label_at)
        self._enclose([(node, self._label_at(node), limits.get(node, UNLIMITED)) for node in self.graph.nodes])
        for node in list(self.graph.nodes):
            self._lower(node)
        for node in reversed(list(self.graph.nodes)):
            if is_left_over(node) and not node.users:
                self.graph.erase_node(node)
            elif annotated(node) is not None:  # otherwise AOT would add streams and events to the backward graph
                node.meta["custom"] = {key: value for key, value in node.meta["custom"].items() if key != "stream"}
        given = tuple(number for number in self.labels if not _torch_private.was_made_while_tracing(number))
        return NativeObjects(self.labels, given, tuple(self.recorded), tuple(self.awaited))

    def _refuse_set_stream(self) -> None:
        """`with torch.npu.stream(s)` asks for the current stream, sets `s`, and in the end the other; more calls are the user's."""
        before: fx.Node | None = None  # the last one that was asked for
        within: list[tuple[fx.Node, fx.Node | None]] = []  # what opened each open block, and what it goes back to
        for node in self.graph.nodes:
            if is_context(node, "current_stream"):
                before = node
            elif is_context(node, "set_stream"):
                if within and node.args[0] is within[-1][1]:
                    within.pop()
                else:
                    within.append((node, before))
        if within:
            raise ScopeError(
                f"{source_line(within[0][0])}: torch.npu.set_stream inside compiled code would change the stream of code "
                "outside the compiled graph; write `with torch.npu.stream(s):` instead"
            )

    def _refuse_untraced_methods(self) -> None:
        """Refuse a method whose order Dynamo did not trace: AOT would drop the call, and the streams would race."""
        for node in self.graph.nodes:
            method = untraced_method(node)
            if method:
                raise ScopeError(
                    f"{source_line(node)} uses {method}, {REFUSED}. Order the streams by `event.record(stream)` and "
                    "`event.wait(stream)` or by npugraph_ex.ops, or use torch 2.12 or later"
                )

    def _name_streams(self) -> None:
        """Give every stream in the graph a label; equal streams get equal labels."""
        known = {identity(traced_current_stream()): MAIN}
        for node in self.graph.nodes:
            for number in mentioned(node):
                stream = identity(_torch_private.traced_object(number))
                self.labels[number] = known.setdefault(stream, f"torch.npu.Stream {len(known)}")

    def _label_at(self, node: fx.Node) -> str:
        """A node's stream: that of its `with` block, or the one that it mentions."""
        if node.target is streams.wait_stream or is_host_wait(node):
            return MAIN  # becomes events on several streams, each in its own scope
        number: object = annotated(node)
        if node.target in (streams.record_event, streams.wait_event):
            number = node.args[1]
        return self.labels.get(number, MAIN) if isinstance(number, int) else MAIN

    def _enclose(self, nodes: Sequence[tuple[fx.Node, str, Limit]]) -> None:
        """Enclose each sequence of nodes with one stream and limit in a scope.

        A sequence ends where another scope begins or ends, so that all stay nested.
        If a native block and a scope both name a stream, the inner one counts.
        """
        current: _ScopeState = ()
        outside = [""]  # for each open scope that names a stream: the stream of the native block around it
        for node, label, limit in nodes:
            if node.op in ("placeholder", "get_attr") or is_left_over(node):
                continue
            wanted: _ScopeState = ()
            if node.op != "output" and not is_scope(node):
                wanted = _scope_state(MAIN if label == outside[-1] else label, limit)
            if opens_scope(node):
                outside.append(label if STREAM in argument(node, 0, "keys") else outside[-1])
            elif is_scope(node) and len(outside) > 1:
                outside.pop()
            if wanted == current:
                continue
            with self.graph.inserting_before(node):
                if current:
                    self.graph.call_function(EXITS[0])
                if wanted:
                    keys, values = zip(*wanted, strict=True)
                    self.graph.call_function(ENTERS[0], (list(keys), list(values)))
            current = wanted

    def _lower(self, node: fx.Node) -> None:
        """Replace one operator on streams or events."""
        arguments: Any = node.args
        if node.target is streams.record_event:
            self.recorded[arguments[0]] = None
            self._replace(node, [(_ours.tagged_event_record, (self._tag(arguments[0]),))])
        elif node.target is streams.wait_event:
            if arguments[0] not in self.recorded:
                self.awaited[arguments[0]] = None  # recorded before the call, if at all: see `around`
            told = arguments[0] in self.recorded or self._is_recorded_after(node)  # the latter for a remark alone
            self._replace(node, [(_ours.tagged_event_wait, (self._tag(arguments[0]),))] if told else [])
        elif node.target is streams.wait_stream:
            waiting, awaited = (self.labels[number] for number in arguments)
            self._order(node, [awaited], [waiting])
        elif node.target is streams.record_stream:
            self._replace(node, [(_ours.record_stream, (arguments[0], self.labels[arguments[1]]))])
        elif is_host_wait(node):
            self._synchronise(node)
        elif is_query(node):
            raise ScopeError(
                f"{source_line(node)} asks whether a stream or event is done, but a compiled graph runs without the host. "
                "Move the query out of the compiled function"
            )

    def _is_recorded_after(self, wait: fx.Node) -> bool:
        records = self.graph.find_nodes(op="call_function", target=streams.record_event)
        return any(record.args[0] == wait.args[0] for record in records)

    def _synchronise(self, node: fx.Node) -> None:
        """Replace a wait of the host. The host launches nothing until then, so everything later comes after the awaited work."""
        arguments: Any = node.args
        everything = [MAIN, *dict.fromkeys(label for label in self.labels.values() if label != MAIN)]
        if is_device_wide(node):
            self._order(node, everything, everything)
        elif node.target is SYNCHRONIZE_STREAM:
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
        """One call on the stream of a label, outside the scopes that this pass makes."""
        if label == MAIN:
            return [(operator, (tag,))]
        return [(ENTERS[0], ([STREAM], [label])), (operator, (tag,)), (EXITS[0], ())]

    def _tag(self, number: int) -> str:
        """The tag of an event object."""
        event = _torch_private.traced_object(number)
        return self.event_tags.setdefault(id(event), f"torch.npu.Event {len(self.event_tags) + 1}")

    def _replace(self, node: fx.Node, calls: Sequence[tuple[Any, tuple[Any, ...]]]) -> None:
        for user in list(node.users):  # only Dynamo's own leftovers use a result that is always None
            self.graph.erase_node(user)
        with self.graph.inserting_before(node):
            for target, args in calls:
                new = self.graph.call_function(target, args)
                new.meta = {key: value for key, value in node.meta.items() if key not in {"val", "example_value"}}
        self.graph.erase_node(node)


def _scope_state(label: str, limit: Limit) -> _ScopeState:
    stream: _ScopeState = ((STREAM, label),) if label != MAIN else ()
    return stream if limit == UNLIMITED else (*stream, (CUBE, str(limit[0])), (VECTOR, str(limit[1])))


def lower(gm: fx.GraphModule) -> Callable[[Callable[..., Any]], Callable[..., Any]] | None:
    """Rewrite a Dynamo graph in place.

    Returns:
        The objects for `around`; None if the graph uses no native stream or event.

    Raises:
        ScopeError: the graph asks whether a stream is done, or sets a stream permanently, which compiled code cannot do.
    """
    if not names_streams(gm.graph):
        return None
    as_operators(gm.graph)
    original = fx.GraphModule(gm, copy.deepcopy(gm.graph))
    objects = _NativeLowering(gm.graph).run()
    gm.graph.lint()
    gm.recompile()
    return partial(around, original=original, objects=objects)


def keep_threads_apart(gm: fx.GraphModule) -> None:
    """Give each thread a table of streams of its own, if the graph names streams: each call of any graph pays for the tables."""
    if names_streams(gm.graph):
        _torch_private.traced_objects_by_thread()


def kept(gm: fx.GraphModule) -> Callable[..., Any]:
    """The present form of a Dynamo graph, operator by operator; a copy if `lower` would rewrite it."""
    if not names_streams(gm.graph):
        return gm
    copied = fx.GraphModule(gm, copy.deepcopy(gm.graph))
    as_operators(copied.graph)
    copied.recompile()
    return as_traced(copied)


def on_the_host(gm: fx.GraphModule) -> Callable[..., Any] | None:
    """Run a Dynamo graph that only sets, records or awaits on the host, as in eager mode.

    Around a graph break Dynamo compiles the body of `with torch.npu.stream(s):` as separate graphs, one of which sets the
    stream of the later code.

    Returns:
        A function of the graph's inputs; None if there is something to compile.
    """
    if not names_streams(gm.graph) or has_work(gm.graph):
        return None
    as_operators(gm.graph)
    gm.recompile()
    return as_traced(gm.forward)
