"""Core limits in a graph with native streams: a scope limits the stream that is current where the scope begins.

The device does the same in eager mode. `scope.limit_core_num(..., stream=s)` makes `s` current only at its beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import fx

from npugraph_ex.aclgraph.scopes import check_limit
from npugraph_ex.frontend.native_streams.nodes import is_scope, opens_scope
from npugraph_ex.graph.streams.labels import CUBE, KEPT, VECTOR, labels_of
from npugraph_ex.graph.streams.ops import argument

Limit = tuple[int, int]
"""Cube and vector cores; `KEPT` for the stream's limits around the call."""

UNLIMITED: Limit = (KEPT, KEPT)


@dataclass(frozen=True)
class _OpenScope:
    """An open scope: the node that opened it, the current stream there, and its limit, if it has one."""

    node: fx.Node
    stream: str
    limit: Limit | None


def refuse_impossible(graph: fx.Graph) -> None:
    """Raise ScopeError if a scope of a Dynamo graph asks for more cores than the device has, as eager mode does.

    This comes first because a scope without work disappears before the device could refuse it.
    """
    for node in graph.nodes:
        if opens_scope(node):
            said = labels_of(argument(node, 0, "keys"), argument(node, 1, "values"), {})
            check_limit(*said.get("core_limit", UNLIMITED))


def take_out(graph: fx.Graph, stream_at: Callable[[fx.Node], str]) -> dict[fx.Node, Limit]:
    """Remove the core limits from a Dynamo graph's scopes.

    Args:
        graph: changed in place; a scope keeps its other settings. A scope that the graph does not close stays, and a later
            check refuses it.
        stream_at: the label of the stream that is current at a node.

    Returns:
        The limit of each node that has one.
    """
    limits: dict[fx.Node, Limit] = {}
    opened: list[_OpenScope] = []
    for node in list(graph.nodes):
        if opens_scope(node):
            said = labels_of(argument(node, 0, "keys"), argument(node, 1, "values"), {})
            opened.append(_OpenScope(node, stream_at(node), said.get("core_limit")))
        elif is_scope(node):
            if opened:
                _without_limit(opened.pop(), node)
        else:
            limit = _in_force(opened, stream_at(node))
            if limit != UNLIMITED:
                limits[node] = limit
    return limits


def _in_force(opened: Iterable[_OpenScope], stream: str) -> Limit:
    """The limit of a stream inside open scopes, the outermost first."""
    cube, vector = UNLIMITED
    for scope in opened:
        if scope.stream == stream and scope.limit is not None:
            cube, vector = (new if new != KEPT else old for new, old in zip(scope.limit, (cube, vector), strict=True))
    return cube, vector


def _without_limit(scope: _OpenScope, end: fx.Node) -> None:
    """Remove the limit of one scope, and the whole scope if it has no other setting."""
    if scope.limit is None:
        return
    said = zip(argument(scope.node, 0, "keys"), argument(scope.node, 1, "values"), strict=True)
    others = [(key, value) for key, value in said if key not in {CUBE, VECTOR}]
    if others:
        scope.node.args, scope.node.kwargs = tuple(map(list, zip(*others, strict=True))), {}
        return
    for node in (end, scope.node):
        node.graph.erase_node(node)
