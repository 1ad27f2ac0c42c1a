"""Collects the pass report of one graph while the pipeline runs. It knows a graph's nodes by their names alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from npugraph_ex.graph.launches import Launched
from npugraph_ex.report.findings import Finding, Findings
from npugraph_ex.report.passes import Branch, Fusion, NearMiss, PassRecord, PassReport, RuleRecord


@dataclass
class _OpenRule:
    """A rule's record while the pipeline still adds to it."""

    inactive: str = ""
    source: str = ""
    fusions: list[Fusion] = field(default_factory=list)
    near_misses: dict[str, tuple[tuple[int, ...], NearMiss]] = field(default_factory=dict)

    def close(self, name: str, replaced: Mapping[str, Fusion]) -> RuleRecord:
        """The finished record; a near-miss whose node another variant of the rule fused is none.

        Args:
            name: the rule's.
            replaced: the fusion that replaced each node, of any rule.
        """
        misses = [
            _beside(miss, replaced[node]) if node in replaced else miss
            for node, (_, miss) in self.near_misses.items()
            if node not in replaced or replaced[node].rule != name
        ]
        return RuleRecord(name, tuple(self.fusions), tuple(misses), self.inactive, self.source)


def _beside(miss: NearMiss, fusion: Fusion) -> NearMiss:
    """A near-miss at a node that another rule fused: it names that rule, and would save what is left."""
    left = miss.would_save - fusion.saves
    would_save = Launched(max(0, left.kernels), max(0, left.bytes))
    return replace(miss, reason=f"{miss.reason}; {fusion.rule} fused it", would_save=would_save)


@dataclass
class ReportBuilder:
    """Collects one graph's records in the order in which they come."""

    _passes: list[PassRecord] = field(default_factory=list)
    _rules: dict[str, _OpenRule] = field(default_factory=dict)
    _unfused: list[NearMiss] = field(default_factory=list)
    _streams: list[Finding] = field(default_factory=list)
    _branches: list[Branch] = field(default_factory=list)
    _dropped: list[int] = field(default_factory=lambda: [0, 0])
    _uncompared: dict[str, None] = field(default_factory=dict)
    _compared: int | None = None
    _rounding: dict[str, None] = field(default_factory=dict)

    def add_pass(self, record: PassRecord) -> None:
        """Append a pass."""
        self._passes.append(record)

    def add_rule(self, name: str, inactive: str = "", source: str = "") -> None:
        """Make the rule appear in the report even when nothing matches it; ``source`` is where its search function stands."""
        rule = self._rules.setdefault(name, _OpenRule())
        rule.inactive = rule.inactive or inactive
        rule.source = rule.source or source

    def add_fusion(self, fusion: Fusion) -> None:
        """Append a replaced subgraph to its rule."""
        self._rules.setdefault(fusion.rule, _OpenRule()).fusions.append(fusion)

    def rule_names(self) -> set[str]:
        """The rules that there is a record of so far."""
        return set(self._rules)

    def fusions_of(self, rule: str) -> tuple[Fusion, ...]:
        """What the rule replaced so far."""
        return tuple(self._rules[rule].fusions) if rule in self._rules else ()

    @property
    def made(self) -> set[str]:
        """The names of the nodes that rules made so far, lifting's too."""
        return {name for rule in self._rules.values() for fusion in rule.fusions for name in fusion.by}

    def add_near_miss(self, miss: NearMiss, progress: tuple[int, ...] = (0,)) -> None:
        """Append a near-miss; of several variants of a rule at one node, the one with most ``progress`` stays."""
        misses = self._rules.setdefault(miss.rule, _OpenRule()).near_misses
        if miss.node not in misses or misses[miss.node][0] < progress:
            misses[miss.node] = (progress, miss)

    def add_unfused(self, explanation: NearMiss) -> None:
        """Append an operator that no rule came near."""
        self._unfused.append(explanation)

    def add_finding(self, finding: Finding) -> None:
        """Append what is wrong with the order of streams."""
        self._streams.append(finding)

    def add_branch(self, branch: Branch) -> None:
        """Append kernels that were put on a side stream."""
        self._branches.append(branch)

    @property
    def has_branches(self) -> bool:
        """Whether kernels of a program on one stream were put on a side stream."""
        return bool(self._branches)

    @property
    def findings(self) -> Findings:
        """What is known so far to be wrong with the order of streams."""
        return Findings(tuple(self._streams))

    def add_dropped_events(self, waits: int, records: int) -> None:
        """Count waits that ordered nothing and records that nothing waited for."""
        self._dropped[0] += waits
        self._dropped[1] += records

    def add_compared(self, count: int) -> None:
        """Count graphs whose values are those of the first graph."""
        self._compared = (self._compared or 0) + count

    def add_rounding(self, difference: str) -> None:
        """Say which difference of two graphs rounding explains."""
        self._rounding[difference] = None

    def add_uncompared(self, reason: str) -> bool:
        """Say why values are not compared; whether that is new."""
        new = reason not in self._uncompared
        self._uncompared[reason] = None
        return new

    def mark(self) -> tuple[dict[str, _OpenRule], int]:
        """What the rules did so far and how many branches there are, for ``reset``."""
        rules = {
            name: _OpenRule(rule.inactive, rule.source, list(rule.fusions), dict(rule.near_misses))
            for name, rule in self._rules.items()
        }
        return rules, len(self._branches)

    def reset(self, mark: tuple[dict[str, _OpenRule], int]) -> None:
        """Forget what the rules did since ``mark``, and later branches: the pass was rolled back."""
        self._rules, branches = mark
        del self._branches[branches:]
        self._unfused.clear()

    def build(self) -> PassReport:
        """The finished report."""
        replaced = {
            node: fusion for rule in self._rules.values() for fusion in rule.fusions for node in fusion.replaced
        }
        rules = tuple(rule.close(name, replaced) for name, rule in self._rules.items())
        waits, records = self._dropped
        return PassReport(
            tuple(self._passes), rules, tuple(self._unfused), self.findings,
            tuple(self._branches), waits, records, tuple(self._uncompared),
            self._compared, tuple(self._rounding),
        )  # fmt: skip
