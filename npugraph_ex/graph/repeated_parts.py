"""Makes one operator of those that take the same value into the same parts, as AOT's functionalization writes them.

A program says `q, k, v = x.split(...)` once. After a write of `x`, functionalization splits it anew for each of the three
that is used, and takes the views that lead to what is split anew as well, so that a pattern with one split would not be found.
All of them name the same bytes at every moment, so writes in between do not matter. A part that is itself a graph output
stays a tensor of its own.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping

from torch import fx
from torch.utils import _pytree as pytree

from npugraph_ex.graph.memory.aliases import is_view


def join(graph: fx.Graph) -> None:
    """Let equal parts of one value, or of equal views of it, come from one operator, in place."""
    if sum(map(_takes_apart, graph.nodes)) <= 1:
        return
    outputs = set(graph.output_node().all_input_nodes)
    names: dict[fx.Node, object] = {}  # equal for what is the same view of the same value
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
    """A view's operator and arguments, the values among them by their names; any other node is itself alone."""
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
