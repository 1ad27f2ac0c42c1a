"""Removes nodes whose results nobody uses and that do nothing else.

Kept: writes to memory, random operators, anything torch knows to have side effects, collectives, without which other
processes would wait for ever, and the scope, event and record nodes of streams, which order work although they produce
nothing.
"""

from __future__ import annotations

from torch import fx
from torch._ops import OpOverload

from npugraph_ex.passes.aliases import written_by
from npugraph_ex.passes.collectives import is_collective, is_wait
from npugraph_ex.passes.pass_ import PassContext

ORDERING_NAMESPACES = frozenset({"air", "npugraph_ex"})


def orders_work(node: fx.Node) -> bool:
    """Whether ``node`` opens or closes a scope, records or awaits an event, or meets other processes."""
    if not isinstance(node.target, OpOverload):
        return False
    return node.target.namespace in ORDERING_NAMESPACES or is_collective(node) or is_wait(node)


def has_effect(node: fx.Node) -> bool:
    """Whether ``node`` does something besides producing its result."""
    return node.is_impure() or orders_work(node) or bool(written_by(node))


def run(gm: fx.GraphModule, context: PassContext) -> None:  # noqa: ARG001 - every pass takes it
    """Remove the dead nodes of ``gm.graph``."""
    gm.graph.eliminate_dead_code(is_impure_node=has_effect)
