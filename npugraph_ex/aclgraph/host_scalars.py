"""Scalars in CPU tensors. A capture fixes their values, so the values are part of the graph key.

Dynamo passes a float that it does not specialise, such as an attribute of a module under `dynamic=True`, as a CPU tensor
without dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from npugraph_ex.graph.memory.aliases import AliasFacts, tensor_leaves


def host_scalars(graph: fx.Graph) -> frozenset[fx.Node]:
    """The placeholders of such scalars, and the nodes that the host computes from these alone.

    Empty if the graph returns one of them, because a result must not be a constant of the capture.
    """
    if not any(map(_is_scalar, graph.find_nodes(op="placeholder"))):
        return frozenset()
    facts, found = AliasFacts(graph), set[fx.Node]()
    for node in graph.nodes:
        computed = node.op == "call_function" and node.all_input_nodes and found.issuperset(node.all_input_nodes)
        if computed and node.is_impure():
            continue  # `rand_like(scalar)` returns a new number at each call
        if (node.op == "placeholder" or computed) and _is_scalar(node) and not facts.is_written(node):
            found.add(node)
    returned = graph.output_node().all_input_nodes
    return frozenset() if found.intersection(returned) else frozenset(found)


def _is_scalar(node: fx.Node) -> bool:
    leaves = list(tensor_leaves(node))
    return bool(leaves) and all(leaf.device.type == "cpu" and leaf.dim() == 0 for leaf in leaves)


def values(inputs: Sequence[Any], positions: Sequence[int]) -> tuple[str, ...]:
    """Keys of the scalars at ``positions``. Equal keys mean equal values: -0.0 differs from 0.0, and NaN equals NaN."""
    return tuple([repr(inputs[position].item()) for position in positions])
