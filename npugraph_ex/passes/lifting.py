"""The lifting pass: fused operators in place of their spellings in ATen operators. `npugraph_ex.lifting` says what it promises."""

from __future__ import annotations

from torch import fx

from npugraph_ex import _torch_private
from npugraph_ex.lifting import engine, joined_weights
from npugraph_ex.passes.base import PassContext


def run(gm: fx.GraphModule, context: PassContext) -> None:
    """The pass. A graph of training is left as it is: its backward expects the values of the spelling."""
    if _torch_private.belongs_to_training(gm.graph):
        engine.refuse(context.report, "the graph has a backward; lifting is for inference")
        return
    options = context.options
    known = joined_weights.parameters(gm.graph, context.values) if options.join_projections else None
    engine.lift(
        gm.graph,
        context.report,
        exact=options.lift == "exact",
        parameters=known,
        every_row_attends=options.every_row_attends,
    )
