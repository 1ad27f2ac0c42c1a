"""Removes nodes whose results nobody uses and that do nothing else.

Kept: writes to memory, random operators, anything torch knows to have side effects, collectives, without which other
processes would wait for ever, and the scope, event and record nodes of streams, which order work although they produce
nothing.
"""

from __future__ import annotations

from torch import fx

from npugraph_ex.graph.effects import has_effect
from npugraph_ex.passes.base import PassContext


def run(gm: fx.GraphModule, context: PassContext) -> None:  # noqa: ARG001 - every pass takes it
    """Remove the dead nodes of ``gm.graph``."""
    gm.graph.eliminate_dead_code(is_impure_node=has_effect)
