"""Finds what is to blame for a failing case: the pass after which results are wrong, and the rule within it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import fx

from npugraph_ex.config import CompilerConfig
from npugraph_ex.config.compiler_config import apply_flat
from npugraph_ex.observe.report import PassReport
from npugraph_ex.passes import pipeline
from npugraph_ex.passes.pass_ import Pass
from npugraph_ex.testing import tracing
from npugraph_ex.testing.oracle import Case, Outcome, check_optimised


def find_guilty(case: Case) -> str:
    """What makes the case fail, in words: a pass, with its rules if it fused, or capture and replay.

    The graph is optimised by the first pass alone, then by the first two, and so on, and run operator by operator
    each time; the pass with which it first goes wrong is to blame.
    """
    case = dataclasses.replace(case, route="graph", expected=None)
    if not case.runs:
        return "the fusion pass, by the number of fusions alone"
    try:
        for count in range(1, len(pipeline.PIPELINE) + 1):
            outcome, report = _with_passes(case, pipeline.PIPELINE[:count])
            if not outcome.ok:
                return _describe(pipeline.PIPELINE[count - 1], report)
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


def _describe(guilty: Pass, report: PassReport) -> str:
    rules = [f"{rule.name} ({', '.join(f.replaced[0] for f in rule.fusions)})" for rule in report.rules if rule.fusions]
    undone = [record.message for record in report.passes if record.outcome == "rolled back"]
    details = [f"rule {', '.join(rules)}"] if rules and guilty.name == "fusion" else []
    details += [f"rolled back: {message}" for message in undone]
    return f"pass {guilty.name}" + (f": {'; '.join(details)}" if details else "")
