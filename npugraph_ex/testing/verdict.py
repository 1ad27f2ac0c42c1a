"""Judges every output and every changed input of one call against the float64 reference of its graph."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from npugraph_ex.reference import before_rounding
from npugraph_ex.testing.judge import Judgement, Limits, judge_floating, judge_quantised, same_bits
from npugraph_ex.testing.metadata import host_copy
from npugraph_ex.testing.reference64 import Reference, Spread, only_moves, run_reference, run_spread


@dataclass(frozen=True)
class JudgedValues:
    """What the values are results of.

    Attributes:
        graph: as traced from the original program.
        inputs: makes the inputs of the call, as they were before it, on the device.
        outputs: how many of the values are outputs; the others are the inputs after the call.
        replaced: names of the nodes that were fused. What does not follow from them was computed by the same kernels
            as in eager mode, so the reference starts from its very bits; only what was rewritten is judged.
    """

    graph: fx.GraphModule
    inputs: Callable[[], Sequence[torch.Tensor]]
    outputs: int
    replaced: frozenset[str] = frozenset()


@dataclass
class Verdict:
    """What is wrong with the values, one message each, and the worst distance in ulps."""

    messages: list[str] = field(default_factory=list)
    worst_ulp: float = 0.0


def judge_values(what: JudgedValues, values: Sequence[Any], eager: Sequence[Any], *, limits: Limits) -> Verdict:
    """Judge the outputs, then the inputs, of one call.

    What is computed from a quantised value is judged given what the candidate quantised to: a step of one at a tie is
    right, and so is everything that exactly follows from it. That value must therefore be an output of the graph.
    """
    forced = {**_before_rewriting(what), **_forced(what, values)}
    inputs = what.inputs()
    reference = run_reference(what.graph, inputs, forced=forced)
    spread = run_spread(what.graph, inputs, reference, forced=forced)
    verdict = Verdict()
    for position, (candidate, wanted) in enumerate(zip(values, eager, strict=True)):
        name = f"output {position}" if position < what.outputs else f"input {position - what.outputs} afterwards"
        judged = _judge(position, candidate, wanted, reference, spread, limits)
        if judged.message:
            verdict.messages.append(f"{name}: {judged.message}")
        if (
            isinstance(candidate, torch.Tensor)
            and candidate.dtype.is_floating_point
            and torch.tensor(judged.worst_ulp).isfinite()
        ):
            verdict.worst_ulp = max(verdict.worst_ulp, judged.worst_ulp)
    return verdict


def _judge(
    position: int, candidate: Any, eager: Any, reference: Reference, spread: Spread, limits: Limits
) -> Judgement:
    value, quotient = reference.values[position], reference.quotients[position]
    if not isinstance(candidate, torch.Tensor):
        return Judgement() if candidate == eager else Judgement(1, message=f"{candidate} instead of {eager}")
    if quotient is not None and candidate.dtype == torch.int8:
        return judge_quantised(candidate, quotient, spread=spread.quotients[position], limits=limits)
    if candidate.dtype.is_floating_point:
        return judge_floating(candidate, value, eager=eager, spread=spread.values[position], limits=limits)
    if same_bits(candidate, value.to(candidate.dtype)):
        return Judgement()
    return Judgement(int((candidate != value).sum()), message="exact integers differ from the reference")


def _forced(what: JudgedValues, values: Sequence[Any]) -> dict[str, torch.Tensor]:
    """By node name, what the candidate quantised to, for quantised values that the graph returns."""
    (output,) = what.graph.graph.find_nodes(op="output")
    nodes = pytree.tree_leaves(output.args[0], is_leaf=lambda leaf: leaf is None)
    return {
        node.name: value
        for node, value in zip(nodes, values, strict=False)
        if isinstance(node, fx.Node) and _is_quantised(node)
    }


class _Recorder(fx.Interpreter):
    """Runs a graph on the device and keeps what the named nodes computed, as it was then."""

    def __init__(self, gm: fx.GraphModule, names: frozenset[str]) -> None:
        super().__init__(gm)
        self._names = names
        self.kept: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.name in self._names:
            self.kept[n.name] = pytree.tree_map(host_copy, value)
        return value


def _before_rewriting(what: JudgedValues) -> dict[str, Any]:
    """What the operators computed that do not follow from a fused one."""
    follow: set[fx.Node] = set()
    for node in what.graph.graph.nodes:
        if node.name in what.replaced or any(source in follow for source in node.all_input_nodes):
            follow.add(node)
    if not follow:
        return {}
    names = frozenset(
        node.name
        for node in what.graph.graph.nodes
        if node not in follow and isinstance(node.target, torch._ops.OpOverload) and not only_moves(node.target)
    )
    recorder = _Recorder(what.graph, names)
    with torch.no_grad():
        recorder.run(*what.inputs())
    return recorder.kept


def _is_quantised(node: fx.Node) -> bool:
    source = node.args[0] if node.target is operator.getitem else node
    quantises = isinstance(source, fx.Node) and getattr(source.target, "_schema", None) is not None
    value = node.meta.get("val")
    return (
        quantises
        and source.target._schema.name in before_rounding  # type: ignore[union-attr]
        and isinstance(value, torch.Tensor)
        and value.dtype == torch.int8
    )
