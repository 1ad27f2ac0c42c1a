"""Faults of what is done with a program before it is a graph, and with its halves when it is trained."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from npugraph_ex.testing.mutation import Mutant
from npugraph_ex_conformance.mutants._patches import answering, doing_nothing

_ENTRY, _REPAIRS, _FAMILY = "npugraph_ex.frontend.entry", "npugraph_ex.frontend.upstream_repairs", "idioms"
_TRACING = "npugraph_ex.tracing_repairs"


def _returning_the_value(original: Any) -> Any:
    del original
    return lambda _self, _base, _view, value: value


MUTANTS = (
    Mutant(
        "pads-keep-channels-last", "a pad has the strides that it has on the device",
        f"{_TRACING}.pads:kept", answering(nullcontext()), _FAMILY,
    ),
    Mutant(
        "unused-draws-are-dropped", "random numbers that nobody uses are drawn all the same",
        f"{_TRACING}.unused_draws:kept", answering(nullcontext()), _FAMILY,
    ),
    Mutant(
        "attention-has-no-scale", "attention by heads whose size is an expression of symbols has a scale",
        f"{_TRACING}.attention_scales:kept", answering(nullcontext()), _FAMILY,
    ),
    Mutant(
        "lost-writes-stay-lost", "where AOT has lost a write to memory that an operator returned, the program runs as traced",
        f"{_ENTRY}.undeclared_effects:UndeclaredEffects.lost_write", answering(""), "undeclared effects",
    ),
    Mutant(
        "shared-arguments-are-copied", "an operator reads what it writes into memory that two of its arguments share",
        f"{_REPAIRS}.shared_arguments:stale_read", answering(""), "undeclared effects",
    ),
    Mutant(
        "numbers-lose-their-factor", "a sum with a number that changes between calls keeps its factor",
        f"{_REPAIRS}.number_keywords:kept", answering(nullcontext()), _FAMILY,
    ),
    Mutant(
        "trained-draws-are-dropped", "they are drawn in a graph that is trained, too",
        f"{_REPAIRS}.partition:draws_random_numbers", answering(answer=False), _FAMILY,
    ),
    Mutant(
        "undefined-gradients-are-zeros", "of a result that the loss does not use, the backward gets no zeros",
        f"{_REPAIRS}.undefined_gradients:can_be_kept", answering(answer=False), _FAMILY,
    ),
    Mutant(
        "products-with-zeros-count", "zeros in the place of an undefined gradient are not multiplied by anything",
        f"{_REPAIRS}.undefined_gradients:_name", answering(""), _FAMILY,
    ),
    Mutant(
        "host-scalars-are-unknown", "scalars that the host computes from sizes do not keep a graph from being captured",
        "npugraph_ex.aclgraph.obstacles:host_scalars", answering(frozenset()), _FAMILY,
    ),
    Mutant(
        "inner-regions-write-nothing", "what a nested compile region writes is written, in whatever way and wherever it is called",
        f"{_REPAIRS}.region_writes:restore", doing_nothing, "nested regions",
    ),
    Mutant(
        "regions-write-whole-bases", "a region writes the part of a tensor that it gets, and no more",
        "npugraph_ex.graph.nested_regions:_NestedRegion._after_write", _returning_the_value, "nested regions",
    ),
)  # fmt: skip
