"""Finds the cause of a failing case: the pass after which results are wrong, and the match in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial

from torch import fx
from torch._inductor.pattern_matcher import Match

from npugraph_ex.config import CompilerConfig
from npugraph_ex.config.compiler_config import apply_flat
from npugraph_ex.fusion import engine
from npugraph_ex.fusion.registry import USER_RULES
from npugraph_ex.fusion.rule import PreparedRule
from npugraph_ex.passes import fusion, pipeline
from npugraph_ex.passes.base import Pass, PassContext
from npugraph_ex.report.passes import PassReport
from npugraph_ex.testing.arguments import checked
from npugraph_ex.testing.oracle import tracing
from npugraph_ex.testing.oracle.case import Case, Outcome
from npugraph_ex.testing.oracle.checking import check_optimised


@checked
def find_guilty(case: Case) -> str:
    """Name the cause of the failure: a pass, with its rules if it fused, or capture and replay.

    The graph is optimised by the first pass alone, then by the first two, and so on, and run operator by operator
    each time; the pass with which it first goes wrong is to blame. Where that is fusion, and it replaced several
    matches, each is replaced alone in turn.

    Args:
        case: one that fails.
    """
    case = dataclasses.replace(case, route="graph", expected=None)
    if not case.runs:
        return "the fusion pass, by the number of fusions alone"
    try:
        for count in range(1, len(pipeline.PIPELINE) + 1):
            outcome, report = _with_passes(case, pipeline.PIPELINE[:count])
            if not outcome.ok:
                return _describe(case, pipeline.PIPELINE[:count], report)
    except Exception as error:  # noqa: BLE001 - the fault may be one that stops the compiler itself
        return f"the compiler itself, which raised {type(error).__name__}"
    return "not the values of the optimised graph: the number of fusions, Dynamo's part, or capture and replay"


def _with_passes(case: Case, passes: Sequence[Pass]) -> tuple[Outcome, PassReport]:
    traced = tracing.trace(
        case.function(), case.inputs, case.sizes[0], dynamic=case.dynamic, functional=case.functional
    )
    graph: fx.GraphModule = tracing.copy_of(traced)
    config = CompilerConfig()
    apply_flat(config, dict(case.options))
    examples = [node.meta.get("val") for node in graph.graph.find_nodes(op="placeholder")]
    report = pipeline.run(graph, examples, config.to_options(), passes=tuple(passes))
    return check_optimised(case, traced, graph, report), report


def _describe(case: Case, passes: Sequence[Pass], report: PassReport) -> str:
    guilty = passes[-1]
    details: list[str] = []
    if guilty.name == "fusion":
        fusions = [(rule.name, fused.replaced) for rule in report.rules for fused in rule.fusions]
        wrong = fusions if len(fusions) < 2 else [found for found in fusions if _is_guilty(case, passes, found[1])]
        details += [
            f"rule {name}, match {', '.join(replaced)}{f', alone of {len(fusions)}' if len(fusions) > 1 else ''}"
            for name, replaced in wrong or fusions
        ]
    details += [f"rolled back: {record.message}" for record in report.passes if record.outcome == "rolled back"]
    return f"pass {guilty.name}" + (f": {'; '.join(details)}" if details else "")


def _is_guilty(case: Case, passes: Sequence[Pass], nodes: Sequence[str]) -> bool:
    """Whether the case fails when fusion replaces no other match than that of ``nodes``."""
    alone = dataclasses.replace(passes[-1], run=partial(_fuse_only, frozenset(nodes)))
    outcome, _ = _with_passes(case, (*passes[:-1], alone))
    return not outcome.ok


def _fuse_only(nodes: frozenset[str], gm: fx.GraphModule, context: PassContext) -> None:
    """The fusion pass, with a condition on every rule: the match is the one of ``nodes``."""

    def limited(prepared: PreparedRule) -> PreparedRule:
        def condition(match: Match) -> str | None:
            if not nodes >= {node.name for node in match.nodes}:
                return "another match is on trial"
            return prepared.rule.condition(match)

        return dataclasses.replace(prepared, rule=dataclasses.replace(prepared.rule, condition=condition))

    chosen = fusion.chosen_rules(context.options.fusion_rules or {}, gm.graph)  # type: ignore[attr-defined] # where mutants break it
    rules = (*USER_RULES.snapshot(), *chosen)
    engine.apply_rules(gm.graph, tuple(map(limited, rules)), context.report)
