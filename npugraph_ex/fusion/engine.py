"""The fusion pass: tries every rule at every node, replaces matches that pass all checks, and reports the others.

User rules come first, in the order of their registration, then the default rules. A user's rule is more specific, and a
default rule may match its result. ``attempt`` contains the checks for one node. A rule whose condition raises, or whose
values are wrong, is switched off for the graph; the other rules go on.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx
from torch._inductor.pattern_matcher import PatternExpr

from npugraph_ex import _torch_private
from npugraph_ex.errors import OptionValueError
from npugraph_ex.fusion import exchanged_operands, unfused_norms
from npugraph_ex.fusion.attempt import Attempt
from npugraph_ex.fusion.candidates import anchors, explicit_outputs, may_match
from npugraph_ex.fusion.checks import GraphFacts
from npugraph_ex.fusion.registry import USER_RULES, warn_once
from npugraph_ex.fusion.rule import PreparedRule
from npugraph_ex.fusion.rules import RULE_NAMES
from npugraph_ex.fusion.trace_cache import TraceCache
from npugraph_ex.report.builder import ReportBuilder


def training_rules() -> tuple[PreparedRule, ...]:
    """The registered rules for joint graphs."""
    return tuple(rule for rule in USER_RULES.snapshot() if rule.training)


def check_switches(switches: Mapping[str, bool] | None) -> None:
    """Reject switches of rules that do not exist.

    Args:
        switches: the option ``fusion_rules``.

    Raises:
        OptionValueError: neither a built-in nor a registered rule has that name.
    """
    names = {*RULE_NAMES, *(rule.rule.name for rule in USER_RULES.snapshot())}
    for name in switches or {}:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1, cutoff=0.7)
            hint = f"did you mean {near[0]!r}?" if near else f"the rules are: {', '.join(sorted(names))}"
            if name.startswith("lift_"):
                hint = "the option 'lift' switches all forms of lifting together"
            raise OptionValueError(f"option 'fusion_rules' names {name!r}, but no rule has that name; {hint}")


def apply_rules(graph: fx.Graph, rules: Sequence[PreparedRule], report: ReportBuilder) -> None:
    """Apply ``rules`` in order; each is tried at all nodes before the next.

    Args:
        graph: edited in place.
        rules: prepared rules.
        report: records replacements, near-misses, and norms without a near-miss.
    """
    application = Application(report)
    application.apply(graph, rules)
    application.explain(graph)


@dataclass
class Application:
    """The application of rules to one graph; ``mode`` and ``switches`` are the options' values."""

    report: ReportBuilder
    switches: Mapping[str, bool] = field(default_factory=dict)
    mode: str = ""
    tried: list[PreparedRule] = field(default_factory=list)
    near_missed: set[tuple[str, str]] = field(default_factory=set)

    def apply(self, graph: fx.Graph, rules: Iterable[PreparedRule]) -> None:
        """Apply each rule that is on; those that come one by one may depend on what the earlier ones made."""
        facts: GraphFacts | None = None
        traces = TraceCache()
        for rule in rules:
            inactive = rule.inactive or self._switched_off(rule)
            self.report.add_rule(rule.rule.name, inactive, rule.rule.source)
            if inactive or rule.pattern is None:
                continue
            self.tried.append(rule)
            if may_match(graph, rule.pattern):
                facts = facts or GraphFacts.from_graph(graph)
                self._apply_one(rule, rule.pattern, facts, traces)

    def _apply_one(self, rule: PreparedRule, pattern: PatternExpr, facts: GraphFacts, traces: TraceCache) -> None:
        failure = ""
        with explicit_outputs(facts.graph, pattern, facts.aliases):
            for anchor in anchors(facts.graph, pattern):
                if not _torch_private.is_erased(anchor):
                    failure = Attempt(rule, anchor, facts, traces, self.report, self.near_missed).run()
                if failure:
                    break
        if failure:
            self.give_up(rule, failure)

    def give_up(self, rule: PreparedRule, reason: str) -> None:
        """Record in the report, and once in the log, that a rule failed and is not used further."""
        self.report.add_rule(rule.rule.name, reason)
        warn_once(rule.rule.name, reason)

    def _switched_off(self, rule: PreparedRule) -> str:
        """The reason why the options switch the rule off; empty if they do not."""
        if not self.switches.get(rule.rule.name, True):
            return "the option fusion_rules switches it off"
        return f"it does not apply in mode {self.mode!r}" if self.mode in rule.rule.not_in_modes else ""

    def explain(self, graph: fx.Graph) -> None:
        """Report what would match with operands exchanged, and the norms without a near-miss."""
        names = {rule.rule.name for rule in self.tried}
        own = {(name, node) for name in names for fusion in self.report.fusions_of(name) for node in fusion.by}
        for miss in exchanged_operands.explanations(graph, self.tried, self.near_missed | own):
            self.report.add_near_miss(miss)
            self.near_missed.add((miss.rule, miss.node))
        explained = {node for _, node in self.near_missed} | self.report.made
        for explanation in unfused_norms.explanations(graph, self.tried, explained):
            self.report.add_unfused(explanation)
