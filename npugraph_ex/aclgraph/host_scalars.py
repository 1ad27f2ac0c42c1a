"""Scalars that the caller holds in CPU tensors: a capture bakes them in, so their values are part of the graph's key.

Dynamo passes a float that it does not specialise, such as an attribute of a module under `dynamic=True`, as a CPU tensor
without dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from npugraph_ex.graph.memory.aliases import AliasFacts, tensor_leaves


def host_scalars(graph: fx.Graph) -> frozenset[fx.Node]:
    """The placeholders that hold such a scalar, and what the graph computes on the host from nothing else.

    Empty if the graph returns one of them: what a caller is given must not be the constant of a capture.
    """
    if not any(map(_is_scalar, graph.find_nodes(op="placeholder"))):
        return frozenset()
    facts, found = AliasFacts(graph), set[fx.Node]()
    for node in graph.nodes:
        computed = node.op == "call_function" and node.all_input_nodes and found.issuperset(node.all_input_nodes)
        if computed and node.is_impure():
            continue  # `rand_like(scalar)` gives another number at every call
        if (node.op == "placeholder" or computed) and _is_scalar(node) and not facts.is_written(node):
            found.add(node)
    returned = graph.output_node().all_input_nodes
    return frozenset() if found.intersection(returned) else frozenset(found)


def _is_scalar(node: fx.Node) -> bool:
    leaves = list(tensor_leaves(node))
    return bool(leaves) and all(leaf.device.type == "cpu" and leaf.dim() == 0 for leaf in leaves)


def values(inputs: Sequence[Any], positions: Sequence[int]) -> tuple[str, ...]:
    """The scalars at ``positions``, such that equal keys mean equal values: -0.0 is not 0.0, and NaN is NaN."""
    return tuple([repr(inputs[position].item()) for position in positions])
