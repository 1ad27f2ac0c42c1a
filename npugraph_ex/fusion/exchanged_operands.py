"""Explains what would match with the operands of a sum or product exchanged; the matcher compares them in the pattern's order."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from torch import fx
from torch._inductor.pattern_matcher import FailedMatch, is_match

from npugraph_ex.fusion.candidates import anchors
from npugraph_ex.fusion.pattern import EitherOrder
from npugraph_ex.fusion.rule import PreparedRule
from npugraph_ex.graph.launches import Launched
from npugraph_ex.graph.source import source_line
from npugraph_ex.report.passes import NearMiss


def explanations(
    graph: fx.Graph, rules: Iterable[PreparedRule], known: Collection[tuple[str, str]]
) -> Iterator[NearMiss]:
    """A near-miss for each place of ``graph`` at which a pattern fits with operands exchanged.

    Args:
        graph: the graph after fusion.
        rules: the rules that were tried.
        known: rules and nodes, by name, of which the report has more already: a near-miss, or that the rule made the node.
    """
    for rule in rules:
        for anchor in anchors(graph, rule.pattern) if rule.pattern is not None else ():
            exchanged = [] if (rule.rule.name, anchor.name) in known else _exchanged(rule, anchor)
            if exchanged:
                names = " and ".join(node.name for node in exchanged)
                reason = f"the operands of {names} stand in the other order; a second rule with that order would match"
                yield NearMiss(rule.rule.name, anchor.name, reason, source_line(anchor), Launched(rule.saves))


def _exchanged(rule: PreparedRule, anchor: fx.Node) -> list[fx.Node]:
    """The nodes whose operands the pattern has in the other order; none if it does not fit in any order."""
    assert rule.pattern is not None  # noqa: S101 - inactive rules are not explained
    context = EitherOrder(rule.pattern, anchor.graph)
    try:
        found = context.match(rule.pattern, anchor)
    except FailedMatch:
        return []
    return context.exchanged if is_match(found) else []
