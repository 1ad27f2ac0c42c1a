"""Finds the nodes where a pattern could match, and gives every output that the pattern returns exactly one ``getitem``.

AOT drops the ``getitem`` of an unused output. This module adds it for the match, and removes it afterwards if it is still
unused. Several ``getitem`` of one output are merged and stay merged.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager

from torch import fx
from torch._inductor.pattern_matcher import PatternExpr

from npugraph_ex import _torch_private
from npugraph_ex.fusion.pattern import getitem_source, outputs_of
from npugraph_ex.graph.memory.aliases import AliasFacts


@contextmanager
def explicit_outputs(graph: fx.Graph, pattern: PatternExpr, aliases: AliasFacts) -> Iterator[None]:
    """Within the block, ``getitem`` nodes for all outputs that ``pattern`` returns; unused ones go afterwards."""
    added: list[fx.Node] = []
    for output in outputs_of(pattern):
        source = getitem_source(output)
        if source is None:
            continue
        overload, index = source
        for node in graph.find_nodes(op="call_function", target=overload, sort=False):
            item = _item(node, index)
            if item is not None:
                aliases.add(item)
                added.append(item)
    yield
    for item in added:
        if not _torch_private.is_erased(item) and not item.users:
            item.graph.erase_node(item)


def _item(node: fx.Node, index: int) -> fx.Node | None:
    """A new ``getitem`` if ``node`` has none for ``index``; several are merged into the first."""
    items = sorted(user for user in node.users if user.target is operator.getitem and user.args[1] == index)
    for double in items[1:]:
        double.replace_all_uses_with(items[0])
        node.graph.erase_node(double)
    values = node.meta.get("val")
    if items or not isinstance(values, (list, tuple)) or index >= len(values):
        return None
    with node.graph.inserting_after(node):
        item = node.graph.call_function(operator.getitem, (node, index))
    item.meta["val"] = values[index]
    return item


def may_match(graph: fx.Graph, pattern: PatternExpr) -> bool:
    """Whether the first operator of a match occurs in the graph at all; as fast as a look-up."""
    first = outputs_of(pattern)[0]
    source = getitem_source(first)
    targets = [source[0]] if source is not None else getattr(first, "fns", ())
    op = getattr(first, "op", "call_function")
    return any(graph.find_nodes(op=op, target=target, sort=False) for target in targets)


def anchors(graph: fx.Graph, pattern: PatternExpr) -> list[fx.Node]:
    """The nodes at which ``pattern`` could match, last first, as torch's matcher visits them."""
    first = outputs_of(pattern)[0]
    source = getitem_source(first)
    if source is not None:
        overload, index = source
        calls = graph.find_nodes(op="call_function", target=overload, sort=False)
        found = [u for node in calls for u in node.users if u.target is operator.getitem and u.args[1] == index]
    else:
        op, targets = getattr(first, "op", "call_function"), getattr(first, "fns", ())
        found = [node for target in targets for node in graph.find_nodes(op=op, target=target, sort=False)]
    return sorted(found, reverse=True)
