"""The pass report: what each pass and each fusion rule did to one graph, why a rule did not apply, and the stream check.

The report is plain data; ``builder.ReportBuilder`` collects it while the pipeline runs.
"""

from __future__ import annotations

import difflib
import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from typing import Literal

from tabulate import tabulate

from npugraph_ex._plurals import counted, noun
from npugraph_ex.errors import FusionCountError, NpuGraphExError
from npugraph_ex.graph.launches import Launched
from npugraph_ex.report.findings import FINDING_HEADERS, Findings
from npugraph_ex.report.names import shown_name

PassOutcome = Literal["unchanged", "changed", "rolled back", "skipped"]


@dataclass(frozen=True)
class PassRecord:
    """One pass over the graph: its time, the number of nodes before and after, and the outcome."""

    name: str
    outcome: PassOutcome
    seconds: float = 0.0
    nodes_before: int = 0
    nodes_after: int = 0
    message: str = ""

    def undone(self) -> str:
        """Of a pass that was rolled back, its name, what is missing, what to do, and why."""
        return (
            f"{self.name} was rolled back: its rewrites are missing, values are right; please report it: {self.message}"
        )


SAME_BITS = (0.0, 0.0)
"""The distances of a lift that changes no rounding."""


@dataclass(frozen=True)
class Fusion:
    """One replaced subgraph.

    Attributes:
        rule: its name.
        replaced: the names of the removed nodes.
        by: the names of the new nodes.
        source: ``file:line`` of the user's code.
        guards: what the sizes of later calls must obey.
        ulps: of a lift, the largest distance from float64 that the judge saw, and eager mode's, in ulps; zeros if ``bit_equal``.
        saves: the kernels that it saves a call, and the bytes that these would read and write.
        recomputed: the names of nodes that stay for other users, and whose values the new nodes compute for themselves.
        bit_equal: of a lift, whether each bit is eager mode's because no rounding is changed: there was nothing to judge.
        assumes: of a lift, the option by which the user declares what it needs; empty where it needs nothing.
    """

    rule: str
    replaced: tuple[str, ...]
    by: tuple[str, ...]
    source: str = ""
    guards: tuple[str, ...] = ()
    ulps: tuple[float, float] | None = None
    saves: Launched = field(default_factory=Launched)
    recomputed: tuple[str, ...] = ()
    bit_equal: bool = False
    assumes: str = ""

    def distances(self) -> tuple[str, str]:
        """Of a lift, from float64: its own and eager mode's."""
        if self.ulps is None:
            return "", ""
        if self.bit_equal:
            return "0 from eager mode", "bit-equal by construction"
        return f"{self.ulps[0]:.3g}", f"{self.ulps[1]:.3g}"


@dataclass(frozen=True)
class NearMiss:
    """A subgraph that almost fits a rule's pattern and was not fused; ``reason`` is the first reason.

    ``would_save``: what a fusion would save if the program were changed as the reason says, where that is known; of a rule with
    a search function only the kernels. ``lines``: the lines of the model that would change it so, where they are known.
    ``option``: a declaration of the user's that would let it be fused as it is, and save ``option_saves``.
    ``would_cost``: what such lines, which save at the same place of the model in other graphs, would start here besides.
    """

    rule: str
    node: str
    reason: str
    source: str = ""
    would_save: Launched = field(default_factory=Launched)
    lines: str = ""
    option: str = ""
    option_saves: Launched = field(default_factory=Launched)
    would_cost: Launched = field(default_factory=Launched)


@dataclass(frozen=True)
class Branch:
    """Kernels that the option `auto_streams` put on a side stream.

    Attributes:
        nodes: their names.
        fork: the first kernel after the fork.
        join: the first kernel after the join.
        saves_us: the modelled microseconds that it saves a call, without those of the events.
        bytes: what their results take in the memory of the side stream, at most.
        source: ``file:line`` of the first one.
    """

    nodes: tuple[str, ...]
    fork: str
    join: str
    saves_us: float
    bytes: int
    source: str = ""


@dataclass(frozen=True)
class RuleRecord:
    """One fusion rule over one graph.

    ``inactive`` says why the rule was not tried or given up, ``source`` where its search function stands.
    """

    name: str
    fusions: tuple[Fusion, ...] = ()
    near_misses: tuple[NearMiss, ...] = ()
    inactive: str = ""
    source: str = ""


@dataclass(frozen=True)
class PassReport:
    """What the pipeline did to one graph."""

    passes: tuple[PassRecord, ...] = ()
    rules: tuple[RuleRecord, ...] = ()
    unfused: tuple[NearMiss, ...] = ()
    """Norms without a near-miss, each with the operators after it and the operators that the rules need there."""
    streams: Findings = field(default_factory=Findings)
    """Faults in the order of streams."""
    branches: tuple[Branch, ...] = ()
    """What the option `auto_streams` put on a side stream."""
    dropped_waits: int = 0
    """How many waits for an event were dropped because they ordered nothing."""
    dropped_records: int = 0
    """How many records of an event were dropped because nothing waited for them."""
    uncompared: tuple[str, ...] = ()
    """Why the option ``check_numerics`` compared no values, or not with all inputs."""
    compared: int | None = None
    """After how many passes ``check_numerics`` found the values of the first graph again; None without the option."""
    rounding: tuple[str, ...] = ()
    """The differences of the values found again. The graphs agree in float64, so rounding explains them."""

    def fusions(self, rule: str | None = None) -> int:
        """How many subgraphs were replaced, by ``rule`` or by any."""
        return sum(len(record.fusions) for record in self.rules if rule in (None, record.name))

    def near_misses(self, rule: str | None = None) -> tuple[NearMiss, ...]:
        """The near-misses of ``rule``, or of every rule."""
        return tuple(miss for record in self.rules if rule in (None, record.name) for miss in record.near_misses)

    @property
    def rules_off(self) -> str:
        """Why no fusion rule was tried in this graph; empty if they were."""
        return next((one.message for one in self.passes if one.name == "fusion" and one.outcome == "skipped"), "")

    @property
    def rolled_back(self) -> tuple[PassRecord, ...]:
        """The passes of the library that left a broken graph. The pipeline restored it, and their rewrites are missing."""
        return tuple(one for one in self.passes if one.outcome == "rolled back")

    def require(self, at_least: int, rule: str | None = None) -> None:
        """Raise ``FusionCountError``, with every near-miss, when fewer than ``at_least`` subgraphs, 0 or more, were replaced."""
        if type(at_least) is not int or at_least < 0 or not isinstance(rule, str | None):
            raise NpuGraphExError(
                "require takes how many fusions are expected, 0 or more, and then the rule's name, as in "
                f"require(1, 'my_fusions.search'); it got ({at_least!r}, {rule!r})."
            )
        count = self.fusions(rule)
        if count >= at_least:
            return
        reasons = "\n".join(f"  {miss.node}: {miss.reason} {miss.source}".rstrip() for miss in self.near_misses(rule))
        raise FusionCountError(
            f"Expected at least {counted(at_least, 'fusion')} by {rule or 'any rule'}; there {noun(count, 'was', 'were')} {count}. "
            + (
                self._untried(rule)
                or f"Near-misses:\n{reasons or '  none: nothing in the graph looks like the pattern.'}"
            )
        )

    def _untried(self, rule: str | None) -> str:
        """Why a rule that is asked for was not tried in this graph, or given up; empty if it was used."""
        known = {record.name: record for record in self.rules}
        if self.rules_off and rule not in known:
            return f"Fusion rules were not tried: {self.rules_off.rstrip('.')}."
        if rule is None or not known:
            return ""
        if rule not in known:
            if any(rule in names() for names in _registered):
                return (
                    "The rule was registered after this graph was compiled. Register it before the first call of the compiled "
                    "function, or call torch.compiler.reset() and then the function again."
                )
            if rule in _options_of:
                return f"The rule is off: options={_options_of[rule]} switches it on."
            ends = [name for name in known if name.endswith(f".{rule}")]
            near = ends if len(ends) == 1 else difflib.get_close_matches(rule, known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            return f"No rule has this name.{hint} The rules of this graph: {', '.join(known)}."
        return f"The rule is not used: {known[rule].inactive.rstrip('.')}." if known[rule].inactive else ""

    def tables(self) -> list[tuple[Sequence[str], Sequence[Sequence[object]]]]:
        """Headers and rows of passes, rules, lifts, near-misses, unfused norms, branches and findings, each only if it has rows."""
        passes = [
            (p.name, p.outcome, f"{p.seconds * 1e3:.1f}", p.nodes_before, p.nodes_after, p.message) for p in self.passes
        ]
        rules = [(shown_name(r.name, r.source), len(r.fusions), len(r.near_misses), r.inactive) for r in self.rules]
        lifts = [
            (f.rule, f.replaced[-1], *f.distances(), f.source)
            for r in self.rules
            for f in r.fusions
            if f.ulps is not None
        ]
        misses = [(shown_name(r.name, r.source), m.node, m.reason, m.source) for r in self.rules for m in r.near_misses]
        left = [(m.node, m.reason, m.source) for m in self.unfused]
        branches = [
            (f"{b.nodes[0]} … {b.nodes[-1]}", len(b.nodes), b.fork, b.join, f"{b.saves_us:.2f}", b.bytes, b.source)
            for b in self.branches
        ]
        beside = ("on a side stream", "kernels", "from", "up to", "modelled us won", "bytes at most", "source")
        found: list[tuple[Sequence[str], Sequence[Sequence[object]]]] = [
            (("pass", "outcome", "ms", "nodes before", "after", "note"), passes),
            (("fusion rule", "fused", "near-misses", "inactive because"), rules),
            (("lifted by", "in place of", "ulps from float64", "eager mode's", "source"), lifts),
            (("near-miss of", "node", "reason", "source"), misses),
            (("norm that no rule came near", "reason", "source"), left),
            (beside, branches),
            (FINDING_HEADERS, self.streams.rows()),
        ]
        return [(headers, rows) for headers, rows in found if rows]

    def notes(self) -> list[str]:
        """What is in no table: declarations of the user's, dropped events, what `check_numerics` compared, and what it did not."""
        resting = Counter((f.rule, f.assumes) for r in self.rules for f in r.fusions if f.assumes)
        notes = [f"The pass {one.undone()}" for one in self.rolled_back]
        notes += [
            f"Declared by the option {option}=True, and not proven: {rule} rests on it at {counted(times, 'place')}."
            for (rule, option), times in resting.items()
        ]
        notes += [f"check_numerics compares no values: {reason.rstrip('.')}." for reason in self.uncompared]
        if self.compared:
            found = "which differ by rounding only" if self.rounding else "no difference"
            notes.append(f"check_numerics: {counted(self.compared, 'graph')} compared with the first one, {found}.")
            notes += [
                f"By rounding only, because the graphs agree in float64: {difference.rstrip('.')}."
                for difference in self.rounding
            ]
        elif self.compared is not None and not self.uncompared:
            notes.append("check_numerics: no pass changed the graph, so there was nothing to compare.")
        if self.dropped_waits or self.dropped_records:
            notes.insert(
                0, f"Redundant events: {self.dropped_waits} waits and {self.dropped_records} records were dropped."
            )
        return notes

    def table(self) -> str:
        """The report as text."""
        tables = [tabulate(rows, headers=headers, tablefmt="simple") for headers, rows in self.tables()]
        return "\n\n".join([*tables, *self.notes()])

    __str__ = table

    def _repr_html_(self) -> str:
        """The tables, below a cell of a Jupyter notebook."""
        tables = [tabulate(rows, headers=headers, tablefmt="html") for headers, rows in self.tables()]
        return "".join([*tables, *(f"<p>{escape(note)}</p>" for note in self.notes())])

    def to_json(self) -> str:
        """The report as JSON, one key a field."""
        return json.dumps(asdict(self), indent=2)


_registered: list[Callable[[], Collection[str]]] = []


def registered_in(names: Callable[[], Collection[str]]) -> None:
    """Let reports ask which rules are registered now: one that a graph lacks may have come after its compilation."""
    _registered.append(names)


_options_of: dict[str, str] = {}


def off_without(rule: str, options: Mapping[str, object]) -> None:
    """Let reports say which options switch on a rule of the library that is off by default."""
    _options_of[rule] = str(dict(options))


_last: list[PassReport] = []


def publish(report: PassReport) -> None:
    """Make ``report`` the result of ``last_report``."""
    _last[:] = [report]


def last_report() -> PassReport | None:
    """The report of the latest graph compiled in this process; None before the first."""
    return _last[0] if _last else None
