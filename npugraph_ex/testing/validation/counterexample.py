"""The smallest program that shows what is wrong, and its script."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from npugraph_ex.testing.crashes import CrashedError, watched
from npugraph_ex.testing.failures.script import script_of
from npugraph_ex.testing.failures.search import smallest_failure
from npugraph_ex.testing.generator.patterns import Pattern
from npugraph_ex.testing.generator.program import Program
from npugraph_ex.testing.oracle.case import Case, Outcome
from npugraph_ex.testing.oracle.checking import check
from npugraph_ex.testing.validation.effort import Effort
from npugraph_ex.testing.validation.infinities import wrong_by_infinities
from npugraph_ex.testing.validation.trials import Trial, without_rule, wrong_without

_SHRINKING_TRIES = 150


class Counterexample(NamedTuple):
    """A program with what came of it."""

    case: Case
    outcome: Outcome

    def written(self, effort: Effort, name: str, *, guilty: str | None) -> str:
        """The path of the script of this name, which is written; empty where ``effort`` has no folder."""
        if effort.folder is None:
            return ""
        path = effort.folder / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(script_of(self.case, self.outcome, guilty=guilty, setup=effort.setup), encoding="utf-8")
        return str(path)


def counterexample(trials: Sequence[Trial], pattern: Pattern, *, without: bool = False) -> Counterexample:
    """The smallest program that is wrong as these are: with the rule only, or ``without`` it."""
    shortest = min(trials, key=lambda trial: len(trial.case.source))
    case, outcome = shortest.case, shortest.outcome
    if without:
        case = without_rule(case, pattern)
        outcome = check(case)
    if shortest.program is None:
        return Counterexample(case, outcome)

    def due_to_the_rule(program: Program) -> bool:
        own = Case.of(program, route=case.route, options=case.options)
        return not wrong_without(own, pattern) and not wrong_by_infinities(program, own)

    try:
        with watched("a smaller counterexample"):
            return Counterexample(*smallest_failure(
                shortest.program, outcome, route=case.route, options=case.options, shrinking_tries=_SHRINKING_TRIES,
                counts=None if without else due_to_the_rule,
            ))  # fmt: skip
    except CrashedError:
        return Counterexample(case, outcome)
