"""How many bytes of results a graph keeps alive at each call: what a pool must hold, before the allocator rounds."""

from __future__ import annotations

import torch
from torch import fx

from npugraph_ex.graph.memory.aliases import AliasFacts
from npugraph_ex.graph.memory.regions import UNKNOWN
from npugraph_ex.graph.operators import tensor_leaves


def alive_bytes(graph: fx.Graph, facts: AliasFacts) -> dict[fx.Node, int]:
    """The bytes of all storages that the graph has made and still needs, while each node runs.

    A storage lives from the node that makes it to the last node that uses it or a view of it. Inputs, and memory that is
    unknown, do not count. A size that is a symbol counts as the size of the traced call.
    """
    given = {UNKNOWN}.union(*(facts.roots(node) for node in graph.nodes if node.op in {"placeholder", "get_attr"}))
    first: dict[int, fx.Node] = {}
    last: dict[int, fx.Node] = {}
    for node in graph.nodes:
        for value in (node, *node.all_input_nodes):
            for root in facts.roots(value) - given:
                first.setdefault(root, node)
                last[root] = node
    begins: dict[fx.Node, int] = {}
    ends: dict[fx.Node, int] = {}
    for root, node in first.items():
        size = _known(facts.storage_bytes(root))
        begins[node] = begins.get(node, 0) + size
        ends[last[root]] = ends.get(last[root], 0) + size
    alive, found = 0, {}
    for node in graph.nodes:
        alive += begins.get(node, 0)
        found[node] = alive
        alive -= ends.get(node, 0)
    return found


def result_bytes(node: fx.Node) -> int:
    """The bytes of the storages that the results of ``node`` lie in."""
    return sum(_known(leaf.untyped_storage().nbytes()) for leaf in tensor_leaves(node))


def _known(size: int | torch.SymInt | None) -> int:
    return size if isinstance(size, int) else 0 if size is None else int(size.node.hint or 0)
