"""The result of a validation: findings and one verdict, as plain data that prints as a table or as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from textwrap import indent
from typing import Literal

from tabulate import tabulate

from npu_emulator.pages import Page, PageTable, Section
from npugraph_ex.errors import NpuGraphExError
from npugraph_ex.report.names import shown_name

Kind = Literal[
    "proven",
    "refuted",
    "guard-too-weak",
    "guard-too-strong",
    "never-matches",
    "never-for-its-example",
    "not-judged",
    "compiler-fault",
    "overlaps-with",
    "differs-for-inf-or-nan",
    "differs-in-sign-of-zero",
]
_ORDER: tuple[Kind, ...] = (
    "refuted", "never-matches", "never-for-its-example", "guard-too-strong", "not-judged", "compiler-fault", "proven",
    "guard-too-weak", "differs-for-inf-or-nan", "differs-in-sign-of-zero", "overlaps-with",
)  # fmt: skip

_HEADERS = ("replacement", "verdict", "fused in", "right in", "worst ULP", "eager there", "sizes and dtypes")


class ReplacementRefutedError(NpuGraphExError):
    """Validation has shown that a replacement is wrong; the message holds the findings."""


@dataclass(frozen=True)
class ValidationFinding:
    """One fact about a replacement.

    Attributes:
        kind: a verdict, or what else is worth knowing.
        text: a sentence or two.
        fails: whether it makes validation fail.
        script: a counterexample that runs with plain ``python``; empty where there is none.
        where: the dtypes, or sizes, that it is about; empty where it is about all that were tried.
    """

    kind: Kind
    text: str
    fails: bool = False
    script: str = ""
    where: str = ""


@dataclass(frozen=True)
class Validation:
    """All findings about one replacement.

    Attributes:
        rule: its name.
        findings: the worst first.
        programs: how many random programs with the pattern in them were run.
        fused: in how many of them it was fused and computed what they compute.
        wrong: in how many of them it was fused and did not.
        worst_ulp: the largest distance of a fused program's result from the float64 reference, right or wrong; 0.0 where
            all equal eager mode's, or differ in what has no distance, a shape or an integer say.
        eager_ulp: eager mode's distance at that element: where terms cancel, it is as far off.
        pattern: the operators that the search function was traced to.
        target: the device that it ran on.
        seed: of the programs.
        settings: how many settings of sizes and dtypes got which answer of the matcher; in how many of them programs "run".
    """

    rule: str
    findings: tuple[ValidationFinding, ...]
    programs: int = 0
    fused: int = 0
    wrong: int = 0
    worst_ulp: float = 0.0
    eager_ulp: float = 0.0
    pattern: str = ""
    target: str = ""
    seed: int = 0
    settings: dict[str, int] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong with it."""
        return not any(finding.fails for finding in self.findings)

    @property
    def verdict(self) -> str:
        """What it comes to, such as "proven on 60", "refuted" or "proven on 60, overlaps-with"; of several failures the worst."""
        words = {"proven": f"proven on {self.fused}"}
        worst = next((finding.kind for finding in self.findings if finding.fails), None)
        told = [
            finding
            for finding in self.findings
            if worst in {None, finding.kind} or not (finding.fails or finding.kind == "guard-too-weak")
        ]
        kinds = [(words.get(finding.kind, finding.kind), finding.where) for finding in told]
        return ", ".join(dict.fromkeys(f"{word} ({where})" if where else word for word, where in kinds))

    def require(self) -> None:
        """Raise ``ReplacementRefutedError`` with the failing findings, if there are any."""
        if not self.ok:
            text = "\n".join(
                f"{finding.kind}: {finding.text}"
                + (f"\n  counterexample: python {finding.script}" if finding.script else "")
                for finding in self.findings
                if finding.fails
            )
            raise ReplacementRefutedError(f"{self.rule}:\n{text}")

    def as_dict(self) -> dict[str, object]:
        """For JSON: every field, and the verdict."""
        return {"verdict": self.verdict, "ok": self.ok, **asdict(self)}

    def page(self) -> Page:
        """It as a page: the row of the table, then each finding. ``page().html()`` is a file."""
        findings = [(finding.kind, finding.text, finding.script) for finding in self.findings]
        sections = (
            Section(
                "Replacement",
                [PageTable(_HEADERS, [_row(self)])],
                f"It looks for {self.pattern}." if self.pattern else "",
            ),
            Section("Findings", [PageTable(("kind", "what was found", "counterexample"), findings)]),
        )
        told = "Nothing is wrong." if self.ok else "Something is wrong."
        return Page(
            f"Validation of {self.rule}", sections, told, good=self.ok, facts=[f"{self.target}, seed {self.seed}"]
        )

    def _repr_html_(self) -> str:
        """The page, below a cell of a Jupyter notebook."""
        return self.page()._repr_html_()

    def __str__(self) -> str:
        return report_table((self,))


def ordered(findings: Sequence[ValidationFinding]) -> tuple[ValidationFinding, ...]:
    """The worst first: failures, then the verdict, then remarks."""
    return tuple(sorted(findings, key=lambda finding: (not finding.fails, _ORDER.index(finding.kind))))


def report_table(results: Sequence[Validation]) -> str:
    """One line a replacement, then every finding in full."""
    rows = [_row(result) for result in results]
    parts = [tabulate(rows, headers=_HEADERS, tablefmt="simple", disable_numparse=True)]
    for result in results:
        lines = [f"{result.rule}", f"  looks for {result.pattern}"] if result.pattern else [result.rule]
        lines += [indent(f"{finding.kind}: {finding.text}", "  ") for finding in result.findings]
        lines += [f"  counterexample: python {finding.script}" for finding in result.findings if finding.script]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _row(result: Validation) -> tuple[str, ...]:
    judged = result.fused + result.wrong
    return (
        shown_name(result.rule), result.verdict, f"{judged} of {result.programs}", f"{result.fused} of {judged}", _worst(result),
        _ulps(result.eager_ulp) if result.worst_ulp else "", _settings(result.settings),
    )  # fmt: skip


def _worst(result: Validation) -> str:
    """The largest distance, or a word where there is none."""
    if result.worst_ulp:
        return _ulps(result.worst_ulp)
    if result.wrong:
        return "see below"
    return "equal" if result.fused else ""


def _ulps(distance: float) -> str:
    return f"{distance:.2f}" if distance < 1000 else f"{distance:.3g}"


def _settings(counts: dict[str, int]) -> str:
    words = {
        "fused": "fused",
        "run": "of them run",
        "guard": "refused by its guard",
        "library": "refused by the library",
    }
    return ", ".join(f"{counts[key]} {word}" for key, word in words.items() if counts.get(key))


def to_json(results: Sequence[Validation], *, complete: bool = True) -> str:
    """All results as one JSON object.

    Args:
        results: of the replacements that were validated.
        complete: whether these are all; nothing is "ok" that was stopped.
    """
    ok = complete and all(result.ok for result in results)
    found = {"ok": ok, "complete": complete, "replacements": [result.as_dict() for result in results]}
    return json.dumps(found, indent=2)
