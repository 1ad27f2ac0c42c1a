"""Joins operators that split the same value into the same parts, as AOT's functionalization writes them.

A program says `q, k, v = x.split(...)` once. After a write of `x`, functionalization splits it again for each of the three,
and repeats the views before the split. A pattern with one split would not match. All of them are always the same bytes, so
writes in between do not matter. A part that is itself a graph output stays a tensor of its own.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping

from torch import fx
from torch.utils import _pytree as pytree

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
    if node.op != "call_function" or not is_view(node):
        return node
    leaves, structure = pytree.tree_flatten((node.args, node.kwargs))
    return node.target, structure, *[(names[leaf],) if isinstance(leaf, fx.Node) else leaf for leaf in leaves]


def _takes_apart(node: object) -> bool:
    """Whether ``node`` is a view of several results, such as `split`."""
    return isinstance(node, fx.Node) and node.target is not operator.getitem and _parts(node) > 1 and is_view(node)


def _parts(node: fx.Node) -> int:
    value = node.meta.get("val")
    return len(value) if isinstance(value, (list, tuple)) else 0
