"""Faults about collectives, which other ranks notice: left out, out of order, fused across, overwritten too early."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import Any

from torch import fx

from npugraph_ex.graph.collectives import is_asynchronous
from npugraph_ex.testing.mutation import Mutant
from npugraph_ex_conformance.mutants._patches import answering


def _swapping(original: Any) -> Any:
    """Starts the second of two collectives before the first one, where both have their arguments by then."""

    def run(gm: fx.GraphModule, *, inputs: bool) -> None:
        original(gm, inputs=inputs)
        started = [node for node in gm.graph.nodes if is_asynchronous(node)]
        for first, second in itertools.pairwise(started):
            if all(source < first for source in second.all_input_nodes):
                first.prepend(second)
                return

    return run


MUTANTS = (
    Mutant(
        "collectives-are-dead-code", "a collective whose result is not used stays: the other ranks take part in it",
        "npugraph_ex._torch_private:never_dead", lambda _original: lambda _operators: nullcontext(), "ranks",
    ),
    Mutant(
        "collectives-change-places", "collectives keep their order",
        "npugraph_ex.passes.reinplace:_run", _swapping, "collectives",
    ),
    Mutant(
        "fusion-goes-across-collectives", "nothing is fused across a collective",
        "npugraph_ex.fusion.checks:GraphFacts.ordering_between", answering(None), "collectives",
    ),
    Mutant(
        "collectives-read-at-their-start", "what a collective may still read is not overwritten before its wait",
        "npugraph_ex.graph.operators:awaited_by", answering(None), "collectives",
    ),
)  # fmt: skip
