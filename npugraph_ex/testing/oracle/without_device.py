"""The oracle without a device: the pipeline's graph and the traced one, run on the CPU and compared by the judge.

It sees what passes and rules do to values, aliases and writes, five times faster than capture and replay. It sees nothing
that happens on a device.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import fx

from npugraph_ex.config import CompilerConfig
from npugraph_ex.config.compiler_config import apply_flat
from npugraph_ex.passes import pipeline
from npugraph_ex.report.passes import PassReport
from npugraph_ex.testing.generator.inputs import Input, make_inputs
from npugraph_ex.testing.oracle.host import HostGraph
from npugraph_ex.testing.oracle.judge import Limits, same_values
from npugraph_ex.testing.oracle.observation import Observation, observe, visible_difference
from npugraph_ex.testing.oracle.verdict import JudgedValues, Verdict, judge_values, unaffected


def optimise(gm: fx.GraphModule, options: Mapping[str, Any]) -> PassReport:
    """Run the pipeline on ``gm``, in place."""
    config = CompilerConfig()
    apply_flat(config, dict(options))
    examples = [node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder")]
    return pipeline.run(gm, examples, config.to_options())


def replaced_nodes(report: PassReport) -> frozenset[str]:
    """The names of the nodes that were fused, and of those that a fused operator computes again."""
    fusions = (fused for rule in report.rules for fused in rule.fusions)
    return frozenset(name for fused in fusions for name in (*fused.replaced, *fused.recomputed))


def compare_on_host(
    traced: fx.GraphModule,
    optimised: fx.GraphModule,
    report: PassReport,
    *,
    inputs: tuple[Input, ...],
    sizes: tuple[Mapping[str, int], ...],
    limits: Limits,
) -> Verdict:
    """Run both graphs for each different set of sizes, with new values, and judge what differs.

    Args:
        traced: the graph as traced.
        optimised: the graph after the passes.
        report: of the passes.
        inputs: the specification of the arguments.
        sizes: for each call, the values of the symbols.
        limits: of the judge.
    """
    before, after = HostGraph(traced), HostGraph(optimised)
    replaced = replaced_nodes(report)
    kept: dict[fx.Node, Any] = dict.fromkeys(unaffected(traced.graph, replaced))
    total, seen = Verdict(), list[Mapping[str, int]]()
    for call, wanted in enumerate(sizes):
        if wanted in seen:
            continue
        seen.append(wanted)
        make = partial(make_inputs, inputs, sizes=wanted, call=call, device="cpu")
        old, new = _observed(before, make(), kept), _observed(after, make())
        what = visible_difference(old, new, strides=False, kept_as=False)
        if what:
            total.messages.append(f"call {call}: {what}")
            return total
        values, expected = (*new.outputs, *new.inputs), (*old.outputs, *old.inputs)
        if all(map(same_values, expected, values)):
            continue
        judged = judge_values(
            JudgedValues(
                traced, make, len(new.outputs), replaced, {node.name: value for node, value in kept.items()}, optimised
            ),
            values, expected, limits=limits,
        )  # fmt: skip
        total.worst_ulp, total.eager_ulp = max((total.worst_ulp, total.eager_ulp), (judged.worst_ulp, judged.eager_ulp))
        total.messages += [f"call {call}, {message}" for message in judged.messages]
        if total.messages:
            break
    return total


def _observed(graph: HostGraph, inputs: list[Any], keep: dict[fx.Node, Any] | None = None) -> Observation:
    return observe(inputs, graph.run(inputs, keep=keep))
