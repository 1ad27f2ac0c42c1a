"""Which nodes start work on the device, and how many a graph has."""

from __future__ import annotations

from torch import fx
from torch._ops import OpOverload

from npugraph_ex.graph.operators import is_view

_NOT_KERNELS = frozenset({"air", "npugraph_ex", "prim", "prims", "_operator"})


def launches(node: fx.Node) -> bool:
    """Whether a node starts work on the device: it calls an operator that is no view and does not order work."""
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace in _NOT_KERNELS:
        return False
    return not is_view(node)


def count_kernels(graph: fx.Graph) -> int:
    """The number of nodes of ``graph`` that start work on the device."""
    return sum(1 for node in graph.nodes if launches(node))
