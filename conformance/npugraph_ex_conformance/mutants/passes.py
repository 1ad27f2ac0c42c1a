"""Faults of the passes: no-op removal, dead code, concatenation, writing in place, and the alias analysis under them."""

from __future__ import annotations

from typing import Any

from npugraph_ex.testing.mutation import Mutant
from npugraph_ex_conformance.mutants._patches import answering

_NOOPS = "npugraph_ex.graph.noops"
_CAT = "npugraph_ex.passes.cat_removal"
_REINPLACE = "npugraph_ex.passes.reinplace"
_MEMORY = "npugraph_ex.graph.memory.memory_map:MemoryMap"


def _only_ends_have_effects(original: Any) -> Any:
    del original
    return lambda node: node.op in {"placeholder", "output"}


def _unwritten_alone(original: Any) -> Any:
    del original
    return lambda node, source, facts, _leaving: not (facts.is_written(node) or facts.is_written(source))


def _leaving_alone(original: Any) -> Any:
    del original
    return lambda node, _source, facts, leaving: not any(facts.share_storage(output, node) for output in leaving)


def _overlap_of_starts(self: Any, other: Any) -> bool:
    return bool(self.root == other.root and self.start == other.start)


MUTANTS = (
    Mutant(
        "noop-removal-ignores-writes", "a copy stays if a write makes it differ from its source",
        f"{_NOOPS}:_copy_is_invisible", _leaving_alone, "exact",
    ),
    Mutant(
        "noop-removal-ignores-outputs", "a result that is a copy stays a copy",
        f"{_NOOPS}:_copy_is_invisible", _unwritten_alone, "exact",
    ),
    Mutant(
        "dead-code-drops-writes", "a write to memory is never dead code",
        "npugraph_ex.graph.effects:has_effect", _only_ends_have_effects, "exact",
    ),
    Mutant(
        "cat-takes-dimension-zero", "a concatenation keeps its dimension",
        f"{_CAT}:_dimension", answering(0), "exact",
    ),
    Mutant(
        "reinplace-ignores-later-reads", "memory that is read later is not overwritten",
        f"{_MEMORY}.reads_after", lambda _original: lambda *_args: iter(()), "exact",
    ),
    Mutant(
        "reinplace-ignores-overlap", "no other operand lies in the bytes that are written",
        f"{_REINPLACE}:_Reinplacer._only_target_is_there", answering(answer=True), "exact",
    ),
    Mutant(
        "reinplace-ignores-layout", "a destination has the shape, dtype and strides of the result",
        f"{_REINPLACE}:_same_layout", answering(answer=True), "exact",
    ),
    Mutant(
        "reinplace-ignores-later-writes", "no later write makes an early one visible",
        f"{_REINPLACE}:_Reinplacer._result_is_done_before", answering(answer=True), "exact",
    ),
    Mutant(
        "regions-compare-starts", "regions overlap from their first byte to their last",
        "npugraph_ex.graph.memory.regions:Region.overlaps", lambda _original: _overlap_of_starts, "exact",
    ),
    Mutant(
        "undeclared-views-stay-behind", "a view lies where its argument lies, also where its schema does not say so",
        "npugraph_ex.graph.metadata:_lies_in", answering(answer=False), "exact",
    ),
    Mutant(
        "numerics-compare-nothing", "with `check_numerics` a pass that changes values is refused",
        "npugraph_ex.passes.numerics:_difference", answering(None), "wrong passes",
    ),
    Mutant(
        "numerics-stay-narrow", "a wrong formula that the roundings of a narrow dtype hide is refused",
        "npugraph_ex.passes.numerics:NumericCheck._problem_without_rounding", answering(None), "wrong passes",
    ),
    Mutant(
        "numerics-trust-float64", "a result that only rounding decides is not taken for rounding",
        "npugraph_ex.passes.numerics:_TrialRun.decided_by_rounding", answering(""), "wrong passes",
    ),
    Mutant(
        "contract-ignores-sharing", "after a pass every output shares memory with what it shared it with before",
        "npugraph_ex.passes.verify:_sharing", lambda _original: lambda _graph, _facts, values: (frozenset(),) * len(values),
        "wrong passes",
    ),
)  # fmt: skip
