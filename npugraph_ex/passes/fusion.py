"""The fusion passes: which rules apply to a graph, and the optional numeric check of each rule."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from torch import fx

from npugraph_ex.errors import GraphVerificationError
from npugraph_ex.fusion.engine import Application, training_rules
from npugraph_ex.fusion.registry import USER_RULES
from npugraph_ex.fusion.rule import PreparedRule
from npugraph_ex.fusion.rules import chosen_rules
from npugraph_ex.graph.snapshot import Snapshot
from npugraph_ex.passes.base import PassContext
from npugraph_ex.passes.numerics import NumericCheck
from npugraph_ex.report.passes import NearMiss


def run(gm: fx.GraphModule, context: PassContext) -> None:
    """The pass: apply the registered rules and the built-in ones that the options switch on to ``gm.graph``."""
    switches = context.options.fusion_rules or {}
    registered = USER_RULES.snapshot()
    rules = itertools.chain((rule for rule in registered if not rule.training), chosen_rules(switches, gm.graph))
    application = _run(gm, context, rules)
    known = context.report.rule_names()
    for rule in registered:
        if rule.rule.name not in known:
            context.report.add_rule(rule.rule.name, "it is for training, and this graph has no backward")
    application.explain(gm.graph)


def run_on_joint_graph(gm: fx.GraphModule, context: PassContext) -> None:
    """The pass over a joint graph of forward and backward: apply the registered rules whose pattern contains a backward."""
    _run(gm, context, training_rules())


def _run(gm: fx.GraphModule, context: PassContext, rules: Iterable[PreparedRule]) -> Application:
    application = Application(context.report, context.options.fusion_rules or {}, context.options.mode)
    if context.numerics is not None:
        _apply_checked(gm, rules, application, context.numerics)
    else:
        application.apply(gm.graph, rules)
    return application


def _apply_checked(
    gm: fx.GraphModule, rules: Iterable[PreparedRule], application: Application, values: NumericCheck
) -> None:
    """Apply one rule after the other and compare the graph's values after each. Undo a rule that changes them."""
    for rule in rules:
        name, report = rule.rule.name, application.report
        before, mark, earlier = Snapshot(gm), report.mark(), len(report.fusions_of(rule.rule.name))
        application.apply(gm.graph, (rule,))
        if not before.differs(gm):
            continue
        try:
            values.check(gm, f"fusion, by rule {name}")
        except GraphVerificationError as error:
            undone = report.fusions_of(name)[earlier:]
            before.restore(gm)
            report.reset(mark)
            application.give_up(rule, f"check_numerics undid it: {error}")
            for fusion in undone:
                application.near_missed.update((name, node) for node in fusion.replaced)
                report.add_near_miss(NearMiss(name, fusion.replaced[-1], str(error), fusion.source), (3,))
