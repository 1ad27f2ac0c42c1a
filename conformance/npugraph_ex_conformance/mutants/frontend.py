"""Faults of what is done with a program before it is a graph, and with its halves when it is trained."""

from __future__ import annotations

from contextlib import nullcontext

from npugraph_ex.testing.mutation import Mutant
from npugraph_ex_conformance.mutants._patches import answering, doing_nothing

_ENTRY, _FAMILY = "npugraph_ex.frontend.entry", "idioms"
MUTANTS = (
    Mutant(
        "pads-keep-channels-last", "a pad has the strides that it has on the device",
        f"{_ENTRY}.pads:make_contiguous", doing_nothing, _FAMILY,
    ),
    Mutant(
        "unused-draws-are-dropped", "random numbers that nobody uses are drawn all the same",
        "npugraph_ex.frontend.upstream_repairs.unused_draws:kept", answering(nullcontext()), _FAMILY,
    ),
    Mutant(
        "trained-draws-are-dropped", "they are drawn in a graph that is trained, too",
        f"{_ENTRY}.partition:draws_random_numbers", answering(answer=False), _FAMILY,
    ),
)  # fmt: skip
