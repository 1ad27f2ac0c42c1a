"""Scopes in a graph: from `scope_enter` and `scope_exit` nodes to labels on nodes, and back.

During the passes a node's scope is in its metadata: `core_limit` (cube cores, vector cores), `deterministic_level`,
`stream_label`. A label moves with its node, and fusion joins only nodes with equal labels; enclosing nodes could not do that.
At the end streams, limits and levels become enclosing nodes again for the run.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from npugraph_ex.errors import ScopeError
from npugraph_ex.graph.source import source_line
from npugraph_ex.graph.streams.events import MAIN, computes, orders_streams, priorities, stream_of
from npugraph_ex.graph.streams.labels import CUBE, LEVEL, PRIORITY, STREAM, VECTOR, Labels, labels_of
from npugraph_ex.graph.streams.ops import ENTERS, EXITS, argument
from npugraph_ex.passes.base import PassContext


def label(gm: fx.GraphModule, context: PassContext) -> None:
    """Turn enclosing nodes into labels. A node keeps a label that it already has, because that comes from an inner scope.

    Raises:
        ScopeError: a scope is closed but was not opened, or is still open at the end of the graph.
    """
    del context
    opened: list[tuple[fx.Node, Labels]] = []
    for node in list(gm.graph.nodes):
        if node.target in ENTERS:
            around = opened[-1][1] if opened else {}
            keys, values = argument(node, 0, "keys"), argument(node, 1, "values")
            opened.append((node, {**around, **labels_of(keys, values, around)}))
        elif node.target in EXITS:
            if not opened:
                raise ScopeError(
                    f"{_at(node)} closes a scope, and none is open; every exit needs its scope_enter before it"
                )
            gm.graph.erase_node(opened.pop()[0])
            gm.graph.erase_node(node)
        elif node.op == "call_function" and opened:
            for key, value in opened[-1][1].items():
                node.meta.setdefault(key, value)
    if opened:
        raise ScopeError(
            f"{_at(opened[-1][0])} opens a scope that the graph does not close. A scope must end in the graph in which "
            "it begins: add the scope_exit, or keep graph breaks out of the `with` block"
        )


def unpaired(graph: fx.Graph) -> fx.Node | None:
    """The first node that closes no scope, or opens one that the graph does not close."""
    alone: list[fx.Node] = []
    for node in graph.nodes:
        if node.target in EXITS and alone and alone[-1].target in ENTERS:
            alone.pop()
        elif node.target in ENTERS or node.target in EXITS:
            alone.append(node)
    return next(iter(alone), None)


def lower(gm: fx.GraphModule, context: PassContext) -> None:
    """Enclose each sequence of nodes with one stream, core limit and level in scope nodes, which set and reset them at run time."""
    del context
    of_stream = priorities(gm.graph)
    current: tuple[tuple[str, str], ...] = ()
    for node in list(gm.graph.nodes):
        if node.op != "output" and not computes(node) and not orders_streams(node):
            continue
        wanted = () if node.op == "output" else _scope_entries(node, of_stream)
        if wanted == current:
            continue
        with gm.graph.inserting_before(node):
            if current:
                gm.graph.call_function(EXITS[0])
            if wanted:
                keys, values = zip(*wanted, strict=True)
                gm.graph.call_function(ENTERS[0], (list(keys), list(values)))
        current = wanted


def _scope_entries(node: fx.Node, of_stream: Mapping[str, int]) -> tuple[tuple[str, str], ...]:
    """The stream, the limits and the level of a node in the form of `scope_enter`; an event needs only the stream."""
    entries: list[tuple[str, str]] = []
    if stream_of(node) != MAIN:
        entries += [(STREAM, stream_of(node)), (PRIORITY, str(of_stream[stream_of(node)]))]
    if orders_streams(node):
        return tuple(entries)
    if "core_limit" in node.meta:
        cube, vector = node.meta["core_limit"]
        entries += [(CUBE, str(cube)), (VECTOR, str(vector))]
    if "deterministic_level" in node.meta:
        entries.append((LEVEL, str(node.meta["deterministic_level"])))
    return tuple(entries)


def _at(node: fx.Node) -> str:
    source = source_line(node)
    return f"{node.name} ({source})" if source else node.name
