"""Which nodes have an effect besides their result: they write memory, order work, or advance a generator."""

from __future__ import annotations

import torch
from torch import fx
from torch._ops import OpOverload

from npugraph_ex.graph.collectives import is_collective, is_wait
from npugraph_ex.graph.operators import written_by
from npugraph_ex.graph.undeclared import is_foreign
from npugraph_ex.operators import record_of

ORDERING_NAMESPACES = frozenset({"air", "npugraph_ex"})


def orders_work(node: fx.Node) -> bool:
    """Whether ``node`` opens or closes a scope, records or awaits an event, or communicates with other processes."""
    if not isinstance(node.target, OpOverload):
        return False
    return node.target.namespace in ORDERING_NAMESPACES or is_collective(node) or is_wait(node)


def has_effect(node: fx.Node) -> bool:
    """Whether ``node`` has an effect besides its result."""
    return node.is_impure() or orders_work(node) or bool(written_by(node))


def remove_dead_nodes(graph: fx.Graph) -> None:
    """Remove nodes without an effect whose results nobody uses; those of other libraries may do more than they say, and stay."""
    graph.eliminate_dead_code(is_impure_node=lambda node: has_effect(node) or is_foreign(node.target))


def draws_random_numbers(node: fx.Node) -> bool:
    """Whether ``node`` takes numbers from a generator: two such calls give two results."""
    if not isinstance(node.target, OpOverload):
        return False
    record = record_of(node.target)
    draws = record.draws_random_numbers if record is not None else None
    return torch.Tag.nondeterministic_seeded in node.target.tags or (
        draws is not None and draws(*node.args, **node.kwargs)
    )
