"""Makes one operator of those that take the same value into the same parts, as AOT's functionalization writes them.

A program says `q, k, v = x.split(...)` once. After a write of `x`, functionalization splits it anew for each of the three
that is used, so that a pattern with one split would not be found. All of them name the same bytes at every moment, so writes
in between do not matter. A part that is itself a graph output stays a tensor of its own.
"""

from __future__ import annotations

import operator

from torch import fx
from torch.utils import _pytree as pytree

from npugraph_ex.passes.aliases import is_view


def join(graph: fx.Graph) -> None:
    """Let the parts of one value come from one operator, in place."""
    outputs = set(graph.output_node().all_input_nodes)
    first: dict[object, fx.Node] = {}
    for node in graph.nodes:
        part = node.target is operator.getitem and _takes_apart(node.args[0])
        if node in outputs or not (part or _takes_apart(node)):
            continue
        leaves, structure = pytree.tree_flatten((node.args, node.kwargs))
        earlier = first.setdefault((node.target, *leaves, structure), node)
        if earlier is not node:
            node.replace_all_uses_with(earlier)
            graph.erase_node(node)


def _takes_apart(node: object) -> bool:
    """Whether ``node`` is a view of several results, such as `split`."""
    return isinstance(node, fx.Node) and node.target is not operator.getitem and _parts(node) > 1 and is_view(node)


def _parts(node: fx.Node) -> int:
    value = node.meta.get("val")
    return len(value) if isinstance(value, (list, tuple)) else 0
