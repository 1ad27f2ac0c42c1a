"""Removes nodes that only rename or only copy their input, where nobody could tell. The rules are in `graph.noops`."""

from __future__ import annotations

from torch import fx

from npugraph_ex.graph import noops
from npugraph_ex.passes.base import PassContext


def run(gm: fx.GraphModule, context: PassContext) -> None:  # noqa: ARG001 - every pass takes it
    """The pass."""
    noops.remove(gm.graph)
