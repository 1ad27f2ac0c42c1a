"""Draws programs, checks them, and keeps the books. Knows hypothesis and the toolkit; knows no particular test."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from npugraph_ex.testing import Case, Outcome, Program, Target

SHRINKING_SECONDS = 30.0


@dataclass(frozen=True)
class Profile:
    """How many examples each kind of test draws: through traced graphs, and through torch.compile, which is slower."""

    planted: int
    near_miss: int
    integers: int
    compiled: int
    tokens: int


PROFILES = {
    "quick": Profile(planted=20, near_miss=15, integers=60, compiled=3, tokens=12),
    "full": Profile(planted=400, near_miss=300, integers=2000, compiled=60, tokens=64),
}


@dataclass
class Row:
    """One line of the table."""

    cases: int = 0
    fused: int = 0
    refused: int = 0
    worst_ulp: float = 0.0
    failed: int = 0


@dataclass
class Run:
    """One run of the suite: what it runs on and what has come of it so far."""

    target: Target
    profile: Profile
    seed: int
    folder: Path | None
    mutant: str | None = None
    rows: dict[tuple[str, str, str], Row] = field(default_factory=dict)
    models: list[dict[str, Any]] = field(default_factory=list)
    checked: int = 0
    seconds: float = 0.0
    on_example: Callable[[], None] = lambda: None

    def record(self, what: str, program: Program, case: Case, outcome: Outcome, seconds: float) -> None:
        """Enter one example into the books."""
        key = (what, program.dtype, "dynamic" if program.dynamic else "static")
        row = self.rows.setdefault(key, Row())
        row.cases += 1
        row.fused += outcome.fusions
        row.refused += int(program.near_miss is not None and outcome.fusions == 0)
        row.worst_ulp = max(row.worst_ulp, outcome.worst_ulp)
        row.failed += int(not outcome.ok)
        self.checked += 1
        self.seconds += seconds
        self.on_example()
        if self.folder is not None:
            entry = {
                "what": what, "near_miss": program.near_miss, "dtype": program.dtype, "dynamic": program.dynamic,
                "route": case.route, "seconds": round(seconds, 4), "fusions": outcome.fusions, "expected": case.expected,
                "worst_ulp": outcome.worst_ulp, "reasons": outcome.near_misses, "failures": outcome.failures,
                "source": program.source,
            }  # fmt: skip
            with (self.folder / "cases.jsonl").open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(entry) + "\n")

    def explore(
        self, name: str, strategy: SearchStrategy[Any], *, examples: int, route: str = "graph", what: str
    ) -> None:
        """Check so many drawn programs; the first failure is shrunk and ends the test with its script.

        Args:
            name: of the test; with the run's seed it decides the examples.
            strategy: of programs.
            examples: how many.
            route: as in ``Case``.
            what: the row of the table.
        """
        search = _Search(self, route, what)
        failure = search.over(strategy, examples, f"{self.seed}:{name}")
        if failure is None:
            return
        from npugraph_ex.testing.script import write_script

        case, outcome = failure
        folder = self.folder or Path("reports/conformance")
        path, text = write_script(case, outcome, folder, _file_name(name))
        pytest.fail(f"{outcome.failures[0]}\n\nThis script reproduces it ({path}):\n\n{text}", pytrace=False)


def _file_name(name: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in name).strip("_")


class _FailedError(Exception):
    """A drawn program failed; the search keeps which."""


class _EnoughError(BaseException):
    """Shrinking has taken long enough. Not an Exception, which hypothesis would take for one more failure to shrink."""


@dataclass
class _Search:
    """One hypothesis search, with an end to its shrinking."""

    run: Run
    route: str
    what: str
    known: dict[Program, tuple[Case, Outcome]] = field(default_factory=dict)
    deadline: float = float("inf")
    kind: str = ""

    def over(self, strategy: SearchStrategy[Any], examples: int, seed: str) -> tuple[Case, Outcome] | None:
        """The smallest failure found, or None."""
        from hypothesis import HealthCheck, Phase, given, settings
        from hypothesis import seed as seeded

        chosen = settings(
            max_examples=examples, database=None, deadline=None, phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck), report_multiple_bugs=False, print_blob=False,
        )  # fmt: skip
        try:
            seeded(seed)(chosen(given(strategy)(self.check)))()
        except (_FailedError, _EnoughError):
            return min(self.known.values(), key=lambda failure: (failure[0].source.count("\n"), len(failure[0].source)))
        return None

    def check(self, program: Program) -> None:
        """Check one program; raise when it fails."""
        from npugraph_ex.testing import Case, check

        failure = self.known.get(program)
        if time.monotonic() > self.deadline:
            raise _EnoughError
        if failure is None:
            case, start = Case.of(program, route=self.route), time.perf_counter()
            outcome = check(case)
            self.run.record(self.what, program, case, outcome, time.perf_counter() - start)
            if outcome.ok:
                return
            # Shrinking stays with the fault that was found first; another one must not hide it.
            self.kind = self.kind or outcome.kind
            if outcome.kind != self.kind:
                return
            failure = self.known[program] = (case, outcome)
            self.deadline = min(self.deadline, time.monotonic() + SHRINKING_SECONDS)
        raise _FailedError
