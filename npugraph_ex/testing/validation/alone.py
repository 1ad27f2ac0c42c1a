"""Computes a pattern alone, with nothing around it, in each of its turns.

One turn costs a tenth of a random program: nothing is captured, and no other pass runs. What comes out wrong is then a program
as the random ones are, and checked as they are.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any

from torch import fx

from npugraph_ex._plurals import counted
from npugraph_ex.fusion.engine import apply_rules
from npugraph_ex.fusion.rule import PreparedRule
from npugraph_ex.graph import noops
from npugraph_ex.report.builder import ReportBuilder
from npugraph_ex.report.passes import PassReport
from npugraph_ex.testing.generator.choices import Choices, Sampled
from npugraph_ex.testing.generator.patterns import Pattern
from npugraph_ex.testing.generator.program import Program
from npugraph_ex.testing.oracle import tracing
from npugraph_ex.testing.oracle.case import Case, Outcome
from npugraph_ex.testing.oracle.checking import check_optimised, failure_of
from npugraph_ex.testing.validation.infinities import wrong_by_infinities
from npugraph_ex.testing.validation.kinds import Kind, leaves_ties
from npugraph_ex.testing.validation.survey import Setting, computing
from npugraph_ex.testing.validation.trials import Fate, Trial, Trials, in_turn, tried
from npugraph_ex.testing.validation.turns import Turn, program_of, values_of

_CONFIRMED = 6
"""So many of the wrong are checked as random programs are; if all are wrong then, too, the others need not be."""
_APART, _SHARE = 1 / 32, 1 / 4
"""Coarser than the rounding of every dtype but float8; where terms cancel by chance, it happens in few turns."""


@dataclass(frozen=True)
class TurnGraphs:
    """A program's graph, the one that the rule makes of it, and the report of that."""

    traced: fx.GraphModule
    optimised: fx.GraphModule
    report: PassReport

    def outcome_of(self, case: Case) -> Outcome:
        """What comes of a case of the program; an error of either graph is a failure."""
        try:
            return check_optimised(case, self.traced, self.optimised, self.report)
        except Exception as error:  # noqa: BLE001 - whatever a kernel raises
            return Outcome([failure_of(case, error)], self.report.fusions())


@dataclass
class Bench:
    """Runs turns of one rule: not captured, and through no other pass. Turns that differ in values alone share their graphs.

    Attributes:
        prepared: the rule.
        pattern: the same, as something to plant.
        options: of the programs that are checked as random ones are.
        graphs: of the turns so far.
        seeds: how many turns had new values.
        missed: why the first turn that is not computed is not; empty if each is.
    """

    prepared: PreparedRule
    pattern: Pattern
    options: Mapping[str, Any]
    graphs: dict[object, TurnGraphs] = field(default_factory=dict)
    seeds: int = 0
    missed: str = ""

    def trial(self, turn: Turn) -> Trial | None:
        """One turn; None where the search function does not take it, nothing fuses, or it ended a process before."""
        prepared = self.program_and_graphs(turn)
        if prepared is None:
            return None
        program, case, graphs = prepared
        with _computing(turn):
            outcome = graphs.outcome_of(case)
            fate: Fate = "right" if outcome.ok else "wrong" if outcome.runnable else "not runnable"
            computed = fate == "wrong" and not outcome.failures[0].startswith("raised ")
            if computed and not turn.special and wrong_by_infinities(program, case, graphs.outcome_of):
                fate = "not finite"
        return Trial(turn.setting, case, outcome, fate, program, turn.kind)

    def program_and_graphs(self, turn: Turn) -> tuple[Program, Case, TurnGraphs] | None:
        """What one turn runs; None where the search function does not take it, nothing fuses, or it ended a process before."""
        try:
            with _computing(turn):
                program = program_of(self.pattern, turn)
                case = Case.of(program, options=self.options)
                graphs = self._graphs_of(program, case)
        except Exception as error:  # noqa: BLE001 - a user's function raises what it likes about numbers and layouts
            first, *_ = str(error).strip().splitlines() or [""]
            self.missed = self.missed or f"{type(error).__name__}: {first}".removesuffix(": ")
            return None
        if graphs.report.fusions():
            return program, case, graphs
        misses = graphs.report.near_misses()
        self.missed = self.missed or (f"nothing fused there, {misses[0].reason}" if misses else "nothing fused there")
        return None

    def again(self, settings: Sequence[Setting], seed: str, examples: int, kinds: tuple[Kind, ...]) -> Trials:
        """So many turns in these settings, with new values of these kinds; of all kinds where there are none."""
        drawn = islice(in_turn(settings, Choices(Sampled(seed))), examples)
        turns = (
            Turn((), setting, *values, seed=self.seeds + number)
            for number, (setting, values) in enumerate(zip(drawn, cycle(values_of(kinds)), strict=False), 1)
        )
        made = [trial for turn in turns if (trial := self.trial(turn)) is not None]
        self.seeds += examples
        return Trials(made)

    def _graphs_of(self, program: Program, case: Case) -> TurnGraphs:
        key = (program.source, program.dynamic, *((x.shape, x.dtype, x.layout, x.alias_of) for x in program.inputs))
        if key not in self.graphs:
            traced = tracing.trace(
                case.function(), case.inputs, case.sizes[0], dynamic=case.dynamic, functional=case.functional
            )
            optimised, report = self._replaced(tracing.copy_of(traced))
            if not report.fusions():
                # As before fusion in a compilation: torch puts a `detach` behind what `zeros_like` and its like make.
                plain = tracing.copy_of(traced)
                noops.remove(plain.graph)
                optimised, report = self._replaced(plain)
            self.graphs[key] = TurnGraphs(traced, optimised, report)
        return self.graphs[key]

    def _replaced(self, graph: fx.GraphModule) -> tuple[fx.GraphModule, PassReport]:
        """The graph after the rule, and the report of that; edits it."""
        report = ReportBuilder()
        apply_rules(graph.graph, (self.prepared,), report)
        graph.recompile()
        return graph, report.build()


@dataclass
class Alone:
    """What came of the turns.

    Attributes:
        trials: all in which the rule fused, and that could be run.
        confirmed: those that were wrong, and were checked as random programs are.
        left_out: each class of which no turn could be judged although the rule fuses there, or which is undefined, with the reason.
        nowhere: why the first turn could not be computed, where none could; else empty.
    """

    trials: Trials = field(default_factory=Trials)
    confirmed: list[Trial] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    nowhere: str = ""

    def confirmed_as(self, fate: Fate) -> list[Trial]:
        """Those that were checked as random programs are, with this outcome."""
        return [trial for trial in self.confirmed if trial.fate == fate]

    def excused(self) -> str:
        """Why nothing can be proven where eager mode itself is far from float64; empty where it is near in most turns.

        The reference has no narrower casts. What a pattern computes of their rounding alone, such as the low part of a number, is
        zero there, and whatever a replacement gives is as near to it as eager mode.
        """
        right = [trial for trial in self.trials.of("right") if not trial.setting.foreign]
        far = [trial for trial in right if trial.outcome.apart > _APART]
        if len(far) <= _SHARE * len(right):
            return ""
        limit, turns = f"1/{round(1 / _APART)}", counted(len(right), "turn")
        return (
            f"in {len(far)} of {turns} alone its results differ from eager mode's by more than {limit} of the largest. They are "
            "as near to float64 as eager mode's, which are mostly what a cast or a sum rounds away."
        )

    def tried(self) -> str:
        """The end of a sentence about what was tried, with what could not be."""
        if self.nowhere:
            return f". Not tried is the pattern alone, in any class of arguments: {self.nowhere.rstrip('.')}"
        judged = len(self.trials.of("right")) + len(self.trials.of("not finite"))
        missing = "".join(f". Not tried is {name}: {why.splitlines()[0]}" for name, why in self.left_out.items())
        return f"; and {judged} times alone, in every class of arguments{missing}" if judged else missing


def _computing(turn: Turn) -> AbstractContextManager[None]:
    """A block that computes a turn, as `computing` is for a setting."""
    return computing(turn.setting, f" ({', '.join(turn.classes)})" if turn.classes else "")


def run_alone(bench: Bench, turns: Sequence[Turn]) -> Alone:
    """Compute each turn on the device, before and after the replacement, and judge what differs."""
    made = [(turn, trial) for turn in turns if (trial := bench.trial(turn)) is not None]
    doubtful = [(turn, trial) for turn, trial in made if trial.fate == "wrong"]
    first = list({turn.classes: trial for turn, trial in reversed(doubtful)}.values())[::-1][:_CONFIRMED]
    special = any(turn.special for turn in turns)
    confirmed = {id(trial): tried(bench.pattern, trial, special=special) for trial in first}
    fates = {trial.fate for trial in confirmed.values()}
    (fate,) = fates if len(fates) == 1 else (None,)

    def settled(trial: Trial) -> Trial:
        if trial.fate != "wrong" or id(trial) in confirmed:
            return confirmed.get(id(trial), trial)
        return tried(bench.pattern, trial, special=special) if fate is None else dataclasses.replace(trial, fate=fate)

    seen: defaultdict[str, list[Trial]] = defaultdict(list)
    found = Alone(confirmed=list(confirmed.values()), nowhere="" if made else bench.missed)
    for turn, trial in made:
        found.trials.made.append(settled(trial))
        for name in turn.classes:
            seen[name].append(found.trials.made[-1])
    for name, trials in seen.items():
        if all(trial.fate in {"not judged", "not captured"} for trial in trials):
            found.left_out[name] = trials[0].outcome.failures[0]
    if made and leaves_ties(bench.pattern):
        found.left_out["what has equal elements"] = (
            "torch does not say which of them comes first, and the pattern's results depend on it"
        )
    return found
