"""Removes nodes that only rename or copy their input, if no program can see the difference. `graph.noops` has the rules."""

from __future__ import annotations

from torch import fx

from npugraph_ex.graph import noops
from npugraph_ex.passes.base import PassContext


def run(gm: fx.GraphModule, context: PassContext) -> None:  # noqa: ARG001 - every pass takes it
    """The pass."""
    noops.remove(gm.graph)
