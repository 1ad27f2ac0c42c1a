"""Which nodes have an effect besides their result: they write memory, or they order work."""

from __future__ import annotations

from torch import fx
from torch._ops import OpOverload

from npugraph_ex.graph.collectives import is_collective, is_wait
from npugraph_ex.graph.operators import written_by

ORDERING_NAMESPACES = frozenset({"air", "npugraph_ex"})


def orders_work(node: fx.Node) -> bool:
    """Whether ``node`` opens or closes a scope, records or awaits an event, or communicates with other processes."""
    if not isinstance(node.target, OpOverload):
        return False
    return node.target.namespace in ORDERING_NAMESPACES or is_collective(node) or is_wait(node)


def has_effect(node: fx.Node) -> bool:
    """Whether ``node`` has an effect besides its result."""
    return node.is_impure() or orders_work(node) or bool(written_by(node))
