"""One hypothesis search over programs: checks each that is drawn, and shrinks the first failure within a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from npugraph_ex.testing.oracle import Case, Outcome, check
from npugraph_ex.testing.program import Program

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

OnCase = Callable[[Program, Case, Outcome, float], None]
SHRINKING_SECONDS = 30.0


class _FailedError(Exception):
    """A drawn program failed; the search keeps which."""


class _EnoughError(BaseException):
    """Shrinking has taken long enough. Not an Exception, which hypothesis would take for one more failure to shrink."""


def find_failure(  # noqa: PLR0913 - a search is said by these
    strategy: SearchStrategy[Program],
    *,
    examples: int,
    seed: str | int = 0,
    route: str = "graph",
    options: Mapping[str, Any] | None = None,
    on_case: OnCase | None = None,
    shrinking_seconds: float = SHRINKING_SECONDS,
) -> tuple[Case, Outcome] | None:
    """Check drawn programs until one fails; answer the smallest failure found, or None.

    Args:
        strategy: of programs.
        examples: how many to draw, at least one.
        seed: the same seed draws the same programs.
        route: as in ``Case``.
        options: compile options.
        on_case: told of every program checked, its case, what came of it, and the seconds that it took.
        shrinking_seconds: how long to look for a smaller failure.

    Raises:
        ValueError: examples is below one.
    """
    if examples < 1:
        raise ValueError(f"find_failure(examples=...) takes an int >= 1; it is {examples}.")
    return _Search(route, options, on_case, shrinking_seconds).over(strategy, examples, str(seed))


@dataclass
class _Search:
    """One search, with an end to its shrinking."""

    route: str
    options: Mapping[str, Any] | None
    on_case: OnCase | None
    shrinking_seconds: float
    known: dict[Program, tuple[Case, Outcome]] = field(default_factory=dict)
    deadline: float = float("inf")
    kind: str = ""

    def over(self, strategy: SearchStrategy[Program], examples: int, seed: str) -> tuple[Case, Outcome] | None:
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
        failure = self.known.get(program)
        if time.monotonic() > self.deadline:
            raise _EnoughError
        if failure is None:
            case, start = Case.of(program, route=self.route, options=self.options), time.perf_counter()
            outcome = check(case)
            if self.on_case is not None:
                self.on_case(program, case, outcome, time.perf_counter() - start)
            if outcome.ok:
                return
            # Shrinking stays with the fault that was found first; another one must not hide it.
            self.kind = self.kind or outcome.kind
            if outcome.kind != self.kind:
                return
            failure = self.known[program] = (case, outcome)
            self.deadline = min(self.deadline, time.monotonic() + self.shrinking_seconds)
        raise _FailedError
