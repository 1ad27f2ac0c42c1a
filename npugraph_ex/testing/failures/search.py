"""Checks random programs one by one, and shrinks the first failure in a limited number of tries.

Hypothesis draws the programs, or a seeded generator, which is thirty times faster. ``shrink`` works on the program itself, and
each of its tries is one check.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hypothesis.strategies import SearchStrategy

from npugraph_ex.testing.arguments import check_least, checked
from npugraph_ex.testing.failures.shrink import TRIES, shrink
from npugraph_ex.testing.generator.program import Program
from npugraph_ex.testing.generator.strategies import Maker, sample
from npugraph_ex.testing.oracle.case import ROUTES, Case, Outcome, check_options, check_route
from npugraph_ex.testing.oracle.checking import check

OnCase = Callable[[Program, Case, Outcome, float], None]


class _FailedError(Exception):
    """A drawn program failed; the search keeps which."""


@checked
def find_failure(  # noqa: PLR0913 - a search is said by these
    strategy: SearchStrategy[Program] | Maker,
    *,
    examples: int,
    seed: str | int = 0,
    route: str = "graph",
    options: Mapping[str, Any] | None = None,
    on_case: OnCase | None = None,
    shrinking_tries: int = TRIES,
    unrunnable: bool = True,
) -> tuple[Case, Outcome] | None:
    """Check drawn programs until one fails. Return the smallest failure found, or None.

    Args:
        strategy: of programs; or a maker of them, such as ``exact_programs()``, which is sampled.
        examples: how many to draw, at least one.
        seed: the same seed draws the same programs.
        route: as in ``Case``.
        options: compile options.
        on_case: told of every program drawn, its case, what came of it, and the processor seconds that it
            took, drawing included.
        shrinking_tries: how many smaller programs to try.
        unrunnable: whether a program that eager mode does not run either is a failure, as it is of our own strategies.

    Raises:
        ValueError: examples is below one, shrinking_tries below zero, or there is no such route or option.
    """
    check_least("examples", examples, 1)
    check_least("shrinking_tries", shrinking_tries, 0)
    check_route("route", route)
    check_options(options or {})
    return _Search(route, options, on_case, shrinking_tries, unrunnable).over(strategy, examples, str(seed))


def smallest_failure(
    program: Program,
    outcome: Outcome,
    *,
    route: str = "graph",
    options: Mapping[str, Any] | None = None,
    shrinking_tries: int = TRIES,
    counts: Callable[[Program], bool] | None = None,
) -> tuple[Case, Outcome]:
    """The smallest failure that a program which fails is shrunk to; the arguments are those of ``find_failure``.

    With ``counts`` a smaller program that fails is taken only if it counts: if it does not fail for another reason, say.
    """
    return _Search(route, options, None, shrinking_tries, unrunnable=False).smallest(program, outcome, counts)


@dataclass
class _Search:
    """One search, with an end to its shrinking."""

    route: str
    options: Mapping[str, Any] | None
    on_case: OnCase | None
    shrinking_tries: int
    unrunnable: bool
    failed: dict[Program, Outcome] = field(default_factory=dict)
    since: float = field(default_factory=time.process_time)

    def over(self, source: SearchStrategy[Program] | Maker, examples: int, seed: str) -> tuple[Case, Outcome] | None:
        """The smallest failure found, or None."""
        search = self._sampled if callable(source) else self._by_hypothesis
        try:
            search(source, examples, seed)  # type: ignore[arg-type] # which of the two was just asked
        except _FailedError:
            return self.smallest(*next(iter(self.failed.items())))
        return None

    def _sampled(self, maker: Maker, examples: int, seed: str) -> None:
        for number in range(examples):
            self.check(sample(maker, f"{seed}:{number}"))

    def _by_hypothesis(self, strategy: SearchStrategy[Program], examples: int, seed: str) -> None:
        from hypothesis import HealthCheck, Phase, given, settings
        from hypothesis import seed as seeded

        chosen = settings(
            max_examples=examples, database=None, deadline=None, phases=(Phase.generate,),
            suppress_health_check=list(HealthCheck), report_multiple_bugs=False, print_blob=False,
        )  # fmt: skip
        seeded(seed)(chosen(given(strategy)(self.check)))()

    def check(self, program: Program) -> None:
        """Check one program; raise when it fails."""
        if program not in self.failed:  # hypothesis runs what failed once more
            case = self._case(program, self.route)
            outcome = check(case)
            since, self.since = self.since, time.process_time()
            if self.on_case is not None:
                self.on_case(program, case, outcome, self.since - since)
            if outcome.ok or not (outcome.runnable or self.unrunnable):
                return
            self.failed[program] = outcome
        raise _FailedError

    def _case(self, program: Program, route: str) -> Case:
        return Case.of(program, route=route, options=self.options)

    def smallest(
        self, program: Program, outcome: Outcome, counts: Callable[[Program], bool] | None = None
    ) -> tuple[Case, Outcome]:
        """A small program that breaks the same promise, on the same route if that route shows it."""
        kind, counted = outcome.kind, outcome.kind.startswith("fused")
        # Where values are wrong, the number of fusions is not what is being looked for and may change.
        start = program if counted else dataclasses.replace(program, expected=None)
        cheaper = ROUTES[: ROUTES.index(self.route)]
        route = next((route for route in cheaper if check(self._case(start, route)).kind == kind), self.route)

        def fails(candidate: Program) -> bool:
            return check(self._case(candidate, route)).kind == kind and (counts is None or counts(candidate))

        try:
            small = shrink(start, fails, tries=self.shrinking_tries)
        except ValueError:
            small = program  # it does not fail every time: what failed is shown as it was drawn
        tries = [
            (dataclasses.replace(small, expected=program.expected), self.route),
            (small, self.route),
            (small, route),
        ]
        for shown, by in tries:
            case = self._case(shown, by)
            result = check(case)
            if result.kind == kind:
                return case, result
        return self._case(program, self.route), outcome
