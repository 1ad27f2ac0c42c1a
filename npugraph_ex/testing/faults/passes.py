"""Faults of the passes: no-op removal, dead code, concatenation, writing in place, and the alias analysis under them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from npugraph_ex.testing.faults._patches import answering, doing_nothing, with_result
from npugraph_ex.testing.mutation import Mutant

_aten = torch.ops.aten
_NOOPS = "npugraph_ex.passes.noop_removal"
_CAT = "npugraph_ex.passes.cat_removal"
_REINPLACE = "npugraph_ex.passes.reinplace"
_MEMORY = "npugraph_ex.graph.memory.memory_map:MemoryMap"


def _only_ends_have_effects(original: Any) -> Any:
    del original
    return lambda node: node.op in {"placeholder", "output"}


def _same_size(node: fx.Node, source: fx.Node) -> bool:
    return bool(node.meta["val"].numel() == source.meta["val"].numel())


def _same_shape(node: fx.Node, source: fx.Node) -> bool:
    return tuple(node.meta["val"].shape) == tuple(source.meta["val"].shape)


def _shape_decides(same: Callable[[fx.Node, fx.Node], bool]) -> Callable[[Any], Any]:
    return lambda _original: same


def _unwritten_alone(original: Any) -> Any:
    del original
    return lambda node, source, facts, _leaving: not (facts.is_written(node) or facts.is_written(source))


def _leaving_alone(original: Any) -> Any:
    del original
    return lambda node, _source, facts, leaving: not any(facts.share_storage(output, node) for output in leaving)


def _other_operator(original: Callable[..., Any]) -> Callable[..., Any]:
    """The in-place form of an addition is a multiplication."""

    def overload(functional: Any) -> Any:
        found = original(functional)
        swapped = {_aten.add_.Tensor: _aten.mul_.Tensor, _aten.neg_.default: _aten.abs_.default}
        swapped |= {_aten.bitwise_not_.default: _aten.neg_.default}
        return swapped.get(found, found)

    return overload


def _other_out_form(original: Callable[..., Any]) -> Callable[..., Any]:
    def overload(functional: Any) -> Any:
        found = original(functional)
        swapped = {_aten.neg.out: _aten.abs.out, _aten.add.out: _aten.mul.out, _aten.bitwise_not.out: _aten.neg.out}
        return found if found is None else (swapped.get(found[0], found[0]), found[1])

    return overload


def _overlap_of_starts(self: Any, other: Any) -> bool:
    return bool(self.root == other.root and self.start == other.start)


def _first_member_only(original: Callable[..., Any]) -> Callable[..., Any]:
    def fill(graph: Any, cat: Any, whole: Any, members: Any, *rest: Any) -> None:
        original(graph, cat, whole, [members[0]] * len(members), *rest)

    return fill


MUTANTS = (
    Mutant(
        "noop-removal-ignores-writes", "a copy stays where a write can tell it from its source",
        f"{_NOOPS}:_copy_is_invisible", _leaving_alone, "exact",
    ),
    Mutant(
        "noop-removal-ignores-outputs", "a copy that is handed out stays a copy",
        f"{_NOOPS}:_copy_is_invisible", _unwritten_alone, "exact",
    ),
    Mutant(
        "noop-removal-compares-sizes", "a view to another shape is no identity",
        f"{_NOOPS}:_is_identity", _shape_decides(_same_size), "planted",
    ),
    Mutant(
        "noop-removal-compares-shapes", "a conversion to another dtype is no identity",
        f"{_NOOPS}:_is_identity", _shape_decides(_same_shape), "planted",
    ),
    Mutant(
        "dead-code-drops-writes", "a write to memory is never dead code",
        "npugraph_ex.passes.dead_code:has_effect", _only_ends_have_effects, "exact",
    ),
    Mutant(
        "cat-picks-another-operator", "a member of a concatenation is computed by its own operator",
        f"{_CAT}:_out_overload", _other_out_form, "exact",
    ),
    Mutant(
        "cat-repeats-a-member", "each member of a concatenation goes to its own place",
        f"{_CAT}:_fill", _first_member_only, "exact",
    ),
    Mutant(
        "cat-writes-for-all", "a member that others use too is not computed into the concatenation",
        f"{_CAT}:_can_write_out", answering(answer=True), "exact",
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
        "reinplace-into-any-input", "an input that the graph does not write stays as it is",
        f"{_REINPLACE}:_is_overwritten", answering(answer=True), "exact",
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
        "reinplace-picks-another-operator", "the in-place form of an operator computes the same",
        f"{_REINPLACE}:inplace_overload", _other_operator, "exact",
    ),
    Mutant(
        "self-copies-everywhere", "only a copy of a value onto itself is dropped",
        f"{_MEMORY}.is_same", answering(answer=True), "exact",
    ),
    Mutant(
        "memory-never-overlaps", "two values with a byte in common are known to overlap",
        f"{_MEMORY}.overlap", answering(answer=False), "exact",
    ),
    Mutant(
        "regions-compare-starts", "regions overlap from their first byte to their last",
        "npugraph_ex.graph.memory.regions:Region.overlaps", lambda _original: _overlap_of_starts, "exact",
    ),
    Mutant(
        "aliases-know-no-writes", "a value in memory that the graph writes is known to be written",
        "npugraph_ex.graph.memory.aliases:AliasFacts.is_written", answering(answer=False), "exact",
    ),
    Mutant(
        "metadata-is-not-refreshed", "new nodes carry metadata of their own",
        "npugraph_ex.graph.metadata:refresh", doing_nothing, "exact",
    ),
    Mutant(
        "noop-removal-knows-no-outputs", "an output is neither renamed nor made to share memory",
        "npugraph_ex.passes.noop_removal:output_values", with_result(lambda _values: []), "exact",
    ),
)  # fmt: skip
