"""Removes nodes without an effect whose results nobody uses.

It keeps writes to memory, random operators, operators with side effects that torch knows, collectives (without them other
processes would wait for ever), and the scopes and events of streams, which order work. It keeps the operators of other libraries:
what they do beside their result, their schemas may not say, and only a run shows it.
"""

from __future__ import annotations

from torch import fx

from npugraph_ex.graph.effects import remove_dead_nodes
from npugraph_ex.passes.base import PassContext


def run(gm: fx.GraphModule, context: PassContext) -> None:  # noqa: ARG001 - every pass takes it
    """Remove the dead nodes of ``gm.graph``."""
    remove_dead_nodes(gm.graph)
