"""Joins operators that split the same value into the same parts, as AOT's functionalization writes them.

A program says `q, k, v = x.split(...)` once. After a write of `x`, functionalization splits it again for each of the three,
and repeats the views before the split. A pattern with one split would not match. All of them are always the same bytes, so
writes in between do not matter. A part that is itself a graph output stays a tensor of its own.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping

from torch import fx

from npugraph_ex.graph.memory.aliases import is_view


def join(graph: fx.Graph) -> None:
    """Make equal parts of one value, or of equal views of it, results of one operator; edits the graph in place."""
    if sum(map(_takes_apart, graph.nodes)) <= 1:
        return
    outputs = set(graph.output_node().all_input_nodes)
    names: dict[fx.Node, object] = {}  # equal for the same view of the same value
    numbers: dict[object, int] = {}
    first: dict[object, fx.Node] = {}
    for node in graph.nodes:
        names[node] = numbers.setdefault(_same_view_key(node, names), len(numbers))
        part = node.target is operator.getitem and _takes_apart(node.args[0])
        if node in outputs or not (part or _takes_apart(node)):
            continue
        earlier = first.setdefault(names[node], node)
        if earlier is not node:
            node.replace_all_uses_with(earlier)
            graph.erase_node(node)


def _same_view_key(node: fx.Node, names: Mapping[fx.Node, object]) -> object:
    """A view's operator and arguments, with nodes by name; any other node equals only itself."""
    return call_key(node, names) if node.op == "call_function" and is_view(node) else node


def call_key(node: fx.Node, names: Mapping[fx.Node, object]) -> object:
    """Equal for calls of one operator with equal arguments, where ``names`` has equal objects for equal nodes."""
    return node.target, _argument_key(node.args, names), _argument_key(tuple(node.kwargs.items()), names)


def _argument_key(value: object, names: Mapping[fx.Node, object]) -> object:
    if isinstance(value, fx.Node):
        return (names[value],)
    # The only containers that an operator's schema has; `pytree` takes ten times as long.
    if isinstance(value, (list, tuple)):
        return tuple([_argument_key(one, names) for one in value])
    return type(value), str(value)  # symbols are asked by their text, because ``==`` of two would add a guard


def _takes_apart(node: object) -> bool:
    """Whether ``node`` is a view of several results, such as `split`."""
    return isinstance(node, fx.Node) and node.target is not operator.getitem and _parts(node) > 1 and is_view(node)


def _parts(node: fx.Node) -> int:
    value = node.meta.get("val")
    return len(value) if isinstance(value, (list, tuple)) else 0
