"""Judges every output and every changed input of one call against the float64 reference of its graph."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from npugraph_ex.graph.effects import orders_work
from npugraph_ex.operators import record_of
from npugraph_ex.testing.oracle.exactness import only_moves
from npugraph_ex.testing.oracle.formats import FORMATS
from npugraph_ex.testing.oracle.host import DeviceGraph, ReferenceUnavailableError
from npugraph_ex.testing.oracle.judge import (
    Judgement,
    Limits,
    judge_exact,
    judge_floating,
    judge_meaning,
    judge_quantised,
    no_good,
    same_values,
)
from npugraph_ex.testing.oracle.reference64 import Reference, WideGraph, run_reference
from npugraph_ex.testing.oracle.spread import FEW_RUNS, MANY_RUNS, Spread, run_spread

_LUCK = 4.0
"""Many runs with noise may spread so many times as far as a few."""


@dataclass(frozen=True)
class JudgedValues:
    """The graph and the inputs behind the values.

    Attributes:
        graph: as traced from the original program.
        inputs: makes the inputs of the call, as they were before it, on the device; on the CPU when ``on_host``.
        outputs: how many of the values are outputs; the others are the inputs after the call.
        replaced: names of the nodes that were fused. What does not follow from them was computed by the same kernels
            as in eager mode, so the reference starts from its very bits; only what was rewritten is judged.
        before: what the operators computed of which ``unaffected`` says that they do not follow from those, by node name,
            in the call that ``eager`` values are of. The graph is run again for it where it is None.
        optimised: the graph that the values are of; None where it is not at hand, and then only their distance is judged.
    """

    graph: fx.GraphModule
    inputs: Callable[[], Sequence[torch.Tensor]]
    outputs: int
    replaced: frozenset[str] = frozenset()
    before: Mapping[str, Any] | None = None
    optimised: fx.GraphModule | None = None


@dataclass
class Verdict:
    """The wrong values, and their distance from the reference.

    Attributes:
        messages: one for each wrong value.
        worst_ulp: the largest distance from the reference, in ulps, among values that differ from eager mode's.
        eager_ulp: eager mode's distance at that element.
        apart: the largest difference from eager mode's values, in terms of the largest of these; of whole numbers and truth
            values the share that differs.
        wrong: how many elements are.
    """

    messages: list[str] = field(default_factory=list)
    worst_ulp: float = 0.0
    eager_ulp: float = 0.0
    apart: float = 0.0
    wrong: int = 0


def judge_values(what: JudgedValues, values: Sequence[Any], eager: Sequence[Any], *, limits: Limits) -> Verdict:
    """Judge the outputs, then the inputs, of one call.

    What is computed from a quantised value is judged given what the candidate quantised to: a step of one at a tie is
    right, and so is everything that exactly follows from it. That value must therefore be an output of the graph.
    """
    verdict, thorough = Verdict(), False
    if all(same_values(value, wanted) for value, wanted in zip(values, eager, strict=True)):
        return verdict  # what eager mode computes is right, and no reference need exist
    forced = {**(_before_rewriting(what) if what.before is None else what.before), **_forced(what, values)}
    inputs = what.inputs()
    graph = WideGraph(what.graph)
    reference = run_reference(graph, inputs, forced=forced)
    spread: Spread | None = None
    units = _units(what.graph, forced)
    meaning = _GraphsInFloat64(what, graph)
    for position, (candidate, wanted) in enumerate(zip(values, eager, strict=True)):
        if same_values(candidate, wanted):
            continue  # what eager mode computes is right
        verdict.apart = max(verdict.apart, _apart(candidate, wanted))
        unit = units[position] if position < what.outputs else None
        name = f"output {position}" if position < what.outputs else f"input {position - what.outputs} afterwards"
        judged = _judge(position, candidate, wanted, reference, spread, unit, limits)
        if judged.message and spread is None:
            # The spread only widens what is permitted, and costs more than all the rest.
            spread = run_spread(graph, inputs, reference, forced=forced)
            judged = _judge(position, candidate, wanted, reference, spread, unit, limits)
        if judged.message and spread is not None and not thorough:
            wider = _judge(position, candidate, wanted, reference, spread.times(_LUCK), unit, limits)
            if wider.ok:  # then more runs may excuse it; what is plainly wrong does not pay for them
                thorough, spread = True, run_spread(graph, inputs, reference, runs=MANY_RUNS, forced=forced)
                judged = _judge(position, candidate, wanted, reference, spread, unit, limits)
        if judged.ok:
            judged = meaning.judged(position, candidate, wanted, limits) or judged
        if judged.message:
            verdict.messages.append(f"{name}: {judged.message}")
            verdict.wrong += judged.wrong
        if (
            isinstance(candidate, torch.Tensor)
            and candidate.dtype.is_floating_point
            and torch.tensor(judged.worst_ulp).isfinite()
        ):
            verdict.worst_ulp, verdict.eager_ulp = max(
                (verdict.worst_ulp, verdict.eager_ulp), (judged.worst_ulp, judged.eager_ulp)
            )
    return verdict


class _GraphsInFloat64:
    """Both graphs in float64 from the inputs on, for ``judge_meaning``; they run where a result has few digits.

    Args:
        what: the graphs and the inputs.
        graph: the original one, prepared.
    """

    def __init__(self, what: JudgedValues, graph: WideGraph) -> None:
        self._what, self._graph = what, graph
        self._units = [] if what.optimised is None else _units(what.graph, {})

    @cached_property
    def _references(self) -> tuple[Reference, Reference] | None:
        """Of the original and the optimised graph; None where an operator of the latter has no reference."""
        assert self._what.optimised is not None  # noqa: S101 - asked for only then
        try:
            optimised = run_reference(self._what.optimised, self._what.inputs())
        except ReferenceUnavailableError:
            return None
        return run_reference(self._graph, self._what.inputs()), optimised

    def _spread(self, runs: int) -> Spread:
        assert self._references is not None  # noqa: S101 - asked for only then
        return run_spread(self._graph, self._what.inputs(), self._references[0], runs=runs, exactly=True)

    def judged(self, position: int, candidate: Any, eager: Any, limits: Limits) -> Judgement | None:
        """What is wrong with the meaning of a value; None where nothing is."""
        if not isinstance(candidate, torch.Tensor) or candidate.dtype not in FORMATS or self._what.optimised is None:
            return None
        unit = (self._units[position] if position < self._what.outputs else None) or candidate.dtype
        if FORMATS[unit].precision >= FORMATS[torch.float32].precision or self._references is None:
            return None
        reference, meant = (one.values[position] for one in self._references)
        if meant.dtype != torch.float64:  # an operator of a user's has a dtype of its own
            return None
        judge = partial(judge_meaning, candidate, reference, meant, eager=eager, unit=unit, limits=limits)
        found = judge()
        for runs in (FEW_RUNS, MANY_RUNS):
            if found.ok:
                return None
            found = judge(spread=self._spread(runs).values[position])
        return None if found.ok else found


def _apart(candidate: Any, eager: Any) -> float:
    if not isinstance(candidate, torch.Tensor) or candidate.shape != eager.shape or candidate.is_complex():
        return 0.0
    one, other = (value.detach().cpu().to(torch.float64) for value in (candidate, eager))
    if not candidate.dtype.is_floating_point:
        return float((one != other).double().mean())
    finite = one.isfinite() & other.isfinite()
    difference, largest = (
        float(values.max()) if values.numel() else 0.0 for values in ((one - other)[finite].abs(), other[finite].abs())
    )
    return difference / largest if largest else float(difference > 0)


def _judge(  # noqa: PLR0913, PLR0917 - what is judged, what it is judged by, and how
    position: int,
    candidate: Any,
    eager: Any,
    reference: Reference,
    spread: Spread | None,
    unit: torch.dtype | None,
    limits: Limits,
) -> Judgement:
    value, quotient = reference.values[position], reference.quotients[position]
    moved = None if spread is None else spread.values[position]
    if not isinstance(candidate, torch.Tensor):
        return Judgement() if candidate == eager else Judgement(1, message=f"{candidate} instead of {eager}")
    if (
        limits.overflow and candidate.element_size() > candidate.dtype.is_floating_point
    ):  # torch cannot choose of float8
        candidate, value, quotient = _without_overflow(candidate, eager, value, quotient)
    if quotient is not None and candidate.dtype == torch.int8:
        rounded = None if spread is None else spread.quotients[position]
        return judge_quantised(candidate, quotient, spread=rounded, limits=limits)
    if candidate.dtype.is_floating_point:
        return judge_floating(candidate, value, eager=eager, spread=moved, unit=unit, limits=limits)
    return judge_exact(candidate, value)


def _without_overflow(
    candidate: torch.Tensor, eager: torch.Tensor, value: torch.Tensor, quotient: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The same, with eager mode's result where it is no good, so that it is right there."""
    quantised = quotient is not None and candidate.dtype == torch.int8
    if candidate.dtype.is_floating_point:
        excused = no_good(eager, value)
    else:
        excused = (eager.to(torch.float64) - value.to(torch.float64)).abs() > (1 if quantised else 0)
    if quotient is not None:
        quotient = torch.where(excused, eager.to(quotient.dtype), quotient)
    return torch.where(excused, eager, candidate), torch.where(excused, eager.to(value.dtype), value), quotient


def _units(gm: fx.GraphModule, exact: Mapping[str, Any]) -> list[torch.dtype | None]:
    """For each output the floating-point dtype with the fewest digits among what it was computed from.

    A float32 result of a cast from float16 cannot be right to more than float16's digits; counted in ulps of float32 it
    would seem thousands wrong. What is given, ``exact``, has lost nothing.
    """
    coarsest: dict[fx.Node, torch.dtype | None] = {}
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        own = [value.dtype] if isinstance(value, torch.Tensor) and value.dtype in FORMATS else []
        computed = node.op == "call_function" and node.name not in exact
        sources = (
            [coarsest[source] for source in node.all_input_nodes if source.op == "call_function"] if computed else []
        )
        known = [dtype for dtype in (*own, *sources) if dtype is not None]
        coarsest[node] = min(known, key=lambda dtype: FORMATS[dtype].precision, default=None)
    (output,) = gm.graph.find_nodes(op="output")
    leaves = pytree.tree_leaves(output.args[0], is_leaf=lambda leaf: leaf is None)
    return [coarsest[leaf] if isinstance(leaf, fx.Node) else None for leaf in leaves]


def _forced(what: JudgedValues, values: Sequence[Any]) -> dict[str, torch.Tensor]:
    """By node name, what the candidate quantised to, for quantised values that the graph returns."""
    (output,) = what.graph.graph.find_nodes(op="output")
    nodes = pytree.tree_leaves(output.args[0], is_leaf=lambda leaf: leaf is None)
    return {
        node.name: value
        for node, value in zip(nodes, values, strict=False)
        if isinstance(node, fx.Node) and _is_quantised(node)
    }


def unaffected(graph: fx.Graph, replaced: frozenset[str]) -> list[fx.Node]:
    """The nodes whose values do not depend on a fused node; none where nothing was fused."""
    follow: set[fx.Node] = set()
    for node in graph.nodes:
        if node.name in replaced or any(source in follow for source in node.all_input_nodes):
            follow.add(node)
    return [node for node in graph.nodes if node not in follow and _computes(node)] if follow else []


def _before_rewriting(what: JudgedValues) -> dict[str, Any]:
    """The device's values of the operators that do not depend on a fused node."""
    kept: dict[fx.Node, Any] = dict.fromkeys(unaffected(what.graph.graph, what.replaced))
    if kept:
        DeviceGraph(what.graph).run(what.inputs(), keep=kept)
    return {node.name: value for node, value in kept.items()}


def _computes(node: fx.Node) -> bool:
    """Whether a node has a result that is more than another one elsewhere."""
    return isinstance(node.target, torch._ops.OpOverload) and not only_moves(node.target) and not orders_work(node)


def _is_quantised(node: fx.Node) -> bool:
    source = node.args[0] if node.target is operator.getitem else node
    record = record_of(source.target) if isinstance(source, fx.Node) else None
    value = node.meta.get("val")
    return (
        record is not None
        and record.before_rounding is not None
        and isinstance(value, torch.Tensor)
        and value.dtype == torch.int8
    )
