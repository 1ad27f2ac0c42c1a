"""Validates replacements: where they match, whether they compute the same, and which other rules match there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

from npugraph_ex._plurals import counted
from npugraph_ex.fusion.registry import USER_RULES
from npugraph_ex.fusion.rule import PreparedRule
from npugraph_ex.fusion.rules import RULE_NAMES
from npugraph_ex.graph.metadata import quiet_refusals
from npugraph_ex.testing import crashes
from npugraph_ex.testing.generator.patterns import Pattern, pattern_of
from npugraph_ex.testing.validation import layouts
from npugraph_ex.testing.validation.alone import Alone, Bench, run_alone
from npugraph_ex.testing.validation.blame import Divide, divide_of
from npugraph_ex.testing.validation.broadcasting import broadcasting
from npugraph_ex.testing.validation.classes import deciding, has_no_elements
from npugraph_ex.testing.validation.counterexample import counterexample
from npugraph_ex.testing.validation.eager import runs
from npugraph_ex.testing.validation.effort import Effort
from npugraph_ex.testing.validation.findings import Validation, ValidationFinding, ordered
from npugraph_ex.testing.validation.kinds import Kind, draws
from npugraph_ex.testing.validation.matching import (
    allowed_too_much,
    overlap,
    overlaps,
    refused_everywhere,
    refused_for_its_example,
)
from npugraph_ex.testing.validation.names import file_name_of, label_of
from npugraph_ex.testing.validation.open_ties import wrong_in_another_order
from npugraph_ex.testing.validation.other_dtypes import other_dtypes
from npugraph_ex.testing.validation.own_program import missed_by_torch_compile
from npugraph_ex.testing.validation.survey import (
    Setting,
    Surveyed,
    asked,
    counts_of,
    example_setting,
    operators_of,
    survey,
)
from npugraph_ex.testing.validation.training import joint_trials
from npugraph_ex.testing.validation.trials import Trial, Trials, at_finite_inputs, computable, run_trials, runnable
from npugraph_ex.testing.validation.turns import special_turns_of, turns_of

_COMPILED = 2
_ATTEMPTS = 5
_COMPARED = 4
_MOST_ELEMENTS = 1 << 15
"""So many are computed with alone; a random program costs more."""


def validate_rule(prepared: PreparedRule, effort: Effort, *, target: str = "") -> Validation:
    """Validate one registered replacement, with every other rule switched off, those of the same name too."""
    rules = USER_RULES.snapshot()
    namesakes = [rule for rule in rules if rule.rule.name == prepared.rule.name and rule.key != prepared.key]
    order = [rule.key for rule in rules]
    label, recorder = label_of(prepared, rules), crashes.current()
    if label in (known := recorder.results()):
        return cast("Validation", known[label])
    validator = _Validator(prepared, effort, target, label, file_name_of(prepared, rules))
    with USER_RULES.without(namesakes), quiet_refusals(), recorder.validates(label):
        found = validator.run()
    further = [
        overlap(label_of(rule, rules), comes_first=order.index(prepared.key) < order.index(rule.key))
        for rule in namesakes
    ]
    found = replace(found, findings=ordered([*found.findings, *further]))
    recorder.keep(label, found)
    return found


@dataclass
class _Validator:
    prepared: PreparedRule
    effort: Effort
    target: str
    label: str
    file_name: str
    findings: list[ValidationFinding] = field(default_factory=list)
    operators: str = ""
    compiler_faults: list[Trial] = field(default_factory=list)
    small: list[Setting] = field(default_factory=list)
    """The settings that fuse and are small enough to compute with."""
    bench: Bench | None = None
    """What computes the pattern alone."""
    alone: Alone = field(default_factory=Alone)
    """What came of the pattern alone, in each class of arguments that decides."""
    worst_shown: tuple[float, float] = (0.0, 0.0)
    """How far off the counterexample is, which was searched for and may be further off than what was tried before."""

    def run(self) -> Validation:
        """All findings about the replacement; what nobody foresaw is one, too, so that other replacements get theirs."""
        try:
            return self._run()
        except OSError:
            raise  # the folder of the counterexamples
        except Exception as error:  # noqa: BLE001 - a user's functions raise what they like
            shown = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
            self._say(
                "not-judged", f"its validation broke off with {shown.removesuffix(': ').rstrip('.')}.", fails=True
            )
            return self._result(Trials(), ())

    def _run(self) -> Validation:
        name = self.prepared.rule.name
        if given_up := crashes.current().given_up(self.label):
            self._say("not-judged", f"{given_up}.", fails=True)
            return self._result(Trials(), ())
        if self.prepared.inactive:
            self._say("not-judged", f"{self.prepared.inactive.rstrip('.')}.", fails=True)
            return self._result(Trials(), ())
        try:
            pattern = pattern_of(self.prepared.rule)
        except TypeError as error:
            self._say("not-judged", f"{error}", fails=True)
            return self._result(Trials(), ())
        answers = survey(self.prepared, pattern, dtypes=self.effort.dtypes)
        traced = [entry.setting for entry in answers if entry.answer != "no trace"]
        self.operators = " -> ".join(operators_of(pattern, traced[0])) if traced else ""
        fused = [entry.setting for entry in answers if entry.answer == "fused"]
        if not fused:
            self._never(pattern, answers)
            return self._result(Trials(), answers)
        own = asked(self.prepared, pattern, example_setting(pattern))
        self.findings += (
            refused_for_its_example(own, answers) + allowed_too_much(answers) + overlaps(self.prepared, pattern, fused)
        )
        if drawing := draws(pattern):
            why = f"it draws random numbers with {drawing}, and other numbers are no fault. Compare their distribution in a test."
            self._say("not-judged", why, fails=True)
            return self._result(Trials(), answers)
        settings = runnable(pattern, fused)
        if self.prepared.training:
            return self._trained(pattern, settings, answers)
        small = computable(pattern, fused, most=_MOST_ELEMENTS)
        others = (
            *broadcasting(self.prepared, pattern, settings),
            *deciding(self.prepared, pattern, small),
            *other_dtypes(self.prepared, pattern, settings, floating=self.effort.dtypes is None),
        )
        further = [entry.setting for entry in others]
        self.small = [*small, *further]
        self.bench = Bench(self.prepared, pattern, self._options())
        turns = turns_of(pattern, self.small)
        self.alone = run_alone(self.bench, turns)
        self.compiler_faults += self.alone.confirmed_as("wrong without it")
        answers = (*answers, *others)
        settings += [one for one in further if not has_no_elements(one)]
        trials = self._tried(pattern, settings, f"{self.effort.seed}:{name}")
        if not trials.of("wrong"):  # else the programs that were asked for show it
            trials.made += self.alone.confirmed_as("wrong")
        if order := wrong_in_another_order(self.bench, turns):
            self._say("refuted", f"{order}.", fails=True)
        else:
            self._judge(pattern, trials, settings)
        if self.compiler_faults:
            self._blame_compiler(pattern)
        return self._result(trials, answers)

    def _say(self, kind: Any, text: str, *, fails: bool = False, script: str = "") -> None:
        self.findings.append(ValidationFinding(kind, text, fails, script))

    def _result(self, trials: Trials, answers: Sequence[Surveyed]) -> Validation:
        right, wrong = trials.of("right"), trials.of("wrong")
        outcomes = [trial.outcome for trial in (*right, *wrong)]
        worst_ulp, eager_ulp = max([self.worst_shown, *((found.worst_ulp, found.eager_ulp) for found in outcomes)])
        tried = {replace(trial.setting, numbers=()) for trial in (*self.alone.trials.made, *trials.made)}
        run = len(tried.intersection(entry.setting for entry in answers if entry.answer == "fused"))
        counts = {str(answer): count for answer, count in counts_of(answers).items()} | {"run": run}
        return Validation(
            rule=self.label,
            findings=_with_crashes(ordered(self.findings), self.label),
            programs=len(trials.made) - len(trials.of("not runnable")),
            fused=len(right),
            wrong=len(wrong),
            worst_ulp=worst_ulp,
            eager_ulp=eager_ulp,
            pattern=self.operators,
            target=self.target,
            seed=self.effort.seed,
            settings={answer: count for answer, count in counts.items() if count and answer != "no trace"},
        )

    # -- where it matches ----------------------------------------------------------------------------------------------

    def _never(self, pattern: Pattern, answers: Sequence[Surveyed]) -> None:
        """Nothing was fused: the guard refused everything, or the library did."""
        guarded = [entry for entry in answers if entry.answer == "guard"]
        if guarded:
            right = self._right_without_guard(pattern, [entry.setting for entry in guarded])
            self._say(
                "guard-too-strong",
                f"it never matches: in {len(guarded)} settings of sizes and dtypes where everything else fits, "
                f"{guarded[0].reason} (for example for {guarded[0].setting}). {right}",
                fails=True,
            )
        else:
            self.findings.append(refused_everywhere(answers))

    def _right_without_guard(self, pattern: Pattern, settings: Sequence[Setting]) -> str:
        """Whether the replacement would be right where its guard refuses it."""
        from npugraph_ex.testing.validation.unguarded import without_guard

        with without_guard(self.prepared):
            trials = self._tried(
                pattern, runnable(pattern, settings), "unguarded", examples=min(10, self.effort.examples)
            )
        right, wrong = len(trials.of("right")), len(trials.of("wrong"))
        if wrong:
            return f"Without it the replacement is wrong in {wrong} of {counted(right + wrong, 'program')}."
        tried = "the only program that was tried" if right == 1 else f"all {right} programs that were tried"
        return f"Without it the replacement is right in {tried}." if right else ""

    # -- whether it is right -------------------------------------------------------------------------------------------

    def _tried(  # noqa: PLR0913 - keyword arguments but for three
        self,
        pattern: Pattern,
        settings: Sequence[Setting],
        seed: str,
        *,
        examples: int = 0,
        route: str = "graph",
        kinds: tuple[Kind, ...] = (),
        special: Sequence[tuple[float, ...]] = (),
    ) -> Trials:
        trials = run_trials(
            pattern, settings, examples=examples or self.effort.examples, seed=seed, options=self._options(),
            route=route, kinds=kinds, special=special, after_each=self.effort.after_each,
        )  # fmt: skip
        self.compiler_faults += trials.of("wrong without it")
        return trials

    def _options(self) -> Mapping[str, Any]:
        """Every rule but this one is off."""
        own = self.prepared.rule.name
        others = dict.fromkeys((rule.rule.name for rule in USER_RULES.snapshot()), False) | dict.fromkeys(
            RULE_NAMES, False
        )
        return {"fusion_rules": {name: False for name in others if name != own}}

    def _judge(self, pattern: Pattern, trials: Trials, settings: Sequence[Setting]) -> None:
        wrong, right = trials.of("wrong"), trials.of("right")
        if wrong:
            self._refute(pattern, trials, settings)
        elif not right:
            unjudged, broken = trials.of("not judged"), trials.of("not runnable")
            overflowed = trials.of("not finite")
            uncaptured = trials.of("not captured")
            why = "no program around the pattern could be run"
            if uncaptured:
                why = f"with the replacement no program can be captured: {uncaptured[0].outcome.failures[0]}"
            elif overflowed:
                why = (
                    "in every program that could be run the pattern computes infinities or NaN, and only finite values tell right "
                    f"from wrong; there the replacement differs: {overflowed[0].outcome.failures[0]}"
                )
            elif unjudged:
                why = unjudged[0].outcome.failures[0]
            elif broken:
                why = f"{why}: {broken[0].outcome.failures[0].splitlines()[0]}"
            self._say("not-judged", _ended(why), fails=True)
        elif len(right) < self.effort.expect:
            self._say(
                "never-matches", f"fused in {len(right)} of {counted(len(trials.made), 'program')}; expected in at least "
                f"{self.effort.expect}", fails=True,
            )  # fmt: skip
        else:
            self._through_torch_compile(pattern, trials, settings)

    def _trained(self, pattern: Pattern, settings: Sequence[Setting], answers: Sequence[Surveyed]) -> Validation:
        """A rule for training is right if its joint graph is, and if it fuses where torch.compile trains."""
        trials = joint_trials(self.prepared, pattern, settings, self.effort)
        judged = [trial.verdict for trial in trials if trial.verdict is not None]
        wrong = [(trial.setting, trial.verdict) for trial in trials if trial.verdict and trial.verdict.messages]
        if wrong:
            setting, verdict = wrong[0]
            self._say(
                "refuted", f"wrong in {len(wrong)} of {counted(len(judged), 'joint graph')} of forward and backward in which it "
                f"fused: for {setting}, {verdict.messages[0]}", fails=True,
            )  # fmt: skip
        elif not judged:
            self._say("not-judged", "its joint graph of forward and backward could not be run.", fails=True)
        elif missed := missed_by_torch_compile(self.prepared, pattern, settings[:_COMPARED], self._options()):
            self._say(
                "never-matches", f"it fuses in traced joint graphs but not through torch.compile: {missed}", fails=True
            )
        else:
            self._say(
                "proven", f"fused in {counted(len(judged), 'joint graph')} of forward and backward, whose results and "
                "gradients a float64 reference judged",
            )  # fmt: skip
        worst = max(((verdict.worst_ulp, verdict.eager_ulp) for verdict in judged), default=(0.0, 0.0))
        run = {"run": len({trial.setting for trial in trials})}
        result = self._result(Trials(), answers)
        return replace(
            result, programs=len(judged), fused=len(judged) - len(wrong), wrong=len(wrong), worst_ulp=worst[0],
            eager_ulp=worst[1], settings=result.settings | run,
        )  # fmt: skip

    def _through_torch_compile(self, pattern: Pattern, trials: Trials, settings: Sequence[Setting]) -> None:
        """Dynamo and AOT may write the pattern differently from what tracing the search function gives."""
        rightly = list(dict.fromkeys(replace(trial.setting, numbers=()) for trial in trials.of("right")))[:_COMPARED]
        compiled = Trials()
        # What a few programs are may keep the rule away, a transposed input say. So "never" needs more than those.
        for attempt in range(_ATTEMPTS):
            more = self._tried(pattern, rightly, f"compiled{attempt or ''}", examples=_COMPILED, route="compile")
            compiled.made += more.made
            if len(more.of("not fused")) + len(more.of("not runnable")) < len(more.made):
                break
        if compiled.of("wrong"):
            self._refute(pattern, compiled, settings, route="compile")
            trials.made += compiled.made  # they are part of what the table counts
        elif compiled.made and len(compiled.of("not fused")) == len(compiled.made):
            misses = [miss for trial in compiled.made for miss in trial.outcome.near_misses]
            why = misses[0] if misses else "nothing in the graph that AOT makes looks like it"
            self._say("never-matches", f"it fuses in traced graphs but not through torch.compile: {why}", fails=True)
        elif missed := missed_by_torch_compile(self.prepared, pattern, rightly, self._options()):
            self._say(
                "never-matches", f"it fuses in random programs but not in its own search function through torch.compile: {missed}",
                fails=True,
            )  # fmt: skip
        else:
            self._at_infinities(pattern, trials, settings)

    def _at_infinities(self, pattern: Pattern, trials: Trials, settings: Sequence[Setting]) -> None:
        """What is right for finite inputs may lose a NaN, or make one: many a fused operator does, so it is a remark only."""
        assert self.bench is not None  # noqa: S101 - it has run already
        special = run_alone(self.bench, special_turns_of(pattern, self.small))
        finitely = list(map(at_finite_inputs, special.confirmed_as("wrong")))
        if any(trial.fate == "wrong" for trial in finitely):
            trials.made += finitely
            self._refute(pattern, trials, settings)
            return
        right = trials.of("right")
        if told := self.alone.excused():
            self._say("not-judged", told, fails=True)
            return
        self._say(
            "proven",
            f"fused in {counted(len(right), 'random program')}, {'each ' if len(right) > 1 else ''}run in eager mode, "
            f"optimised, and captured and replayed, and judged by a float64 reference{self.alone.tried()}",
        )
        overflowed = [*self.alone.trials.of("not finite"), *trials.of("not finite")]
        wrong = [*special.confirmed_as("wrong"), *overflowed, *special.trials.of("wrong")]
        if wrong:
            count, made = len(special.trials.of("wrong")) + len(overflowed), len(special.trials.made) + len(overflowed)
            self._say(
                "differs-for-inf-or-nan", f"right where all that eager mode computes is finite, and wrong in {count} of {made} "
                f"programs with infinities or NaN among them: {wrong[0].outcome.failures[0]}",
            )  # fmt: skip
        fused = [*self.alone.trials.of("right"), *right]
        if other := [trial for trial in fused if trial.outcome.zero_signs]:
            self._say(
                "differs-in-sign-of-zero", f"zeros have another sign than in eager mode in {len(other)} of "
                f"{counted(len(fused), 'program')}, such as for {other[0].setting}; 1/x, atan2 and copysign of them differ",
            )  # fmt: skip

    def _divide(self, pattern: Pattern, trials: Trials, settings: Sequence[Setting]) -> Divide | None:
        """What separates wrong from right: by the classes, which are the same for every seed, where these show the fault."""
        fuses = partial(self._fuses, pattern)
        if self.bench is not None and self.alone.trials.of("wrong"):
            found = divide_of(pattern, self.alone.trials, settings, self.bench.again, fuses)
            # A size that is a symbol has other values than in the setting.
            fixed = [trial.setting for trial in trials.of("wrong") if trial.program and not trial.program.dynamic]
            if found is None or not any(found.feature(setting) in found.right for setting in fixed):
                return found
        return divide_of(pattern, trials, settings, partial(self._again, pattern), fuses)

    def _again(
        self, pattern: Pattern, settings: Sequence[Setting], seed: str, examples: int, kinds: tuple[Kind, ...]
    ) -> Trials:
        return self._tried(pattern, settings, f"{self.effort.seed}:{seed}", examples=examples, kinds=kinds)

    def _fuses(self, pattern: Pattern, setting: Setting) -> bool:
        return runs(pattern, setting) and asked(self.prepared, pattern, setting).answer == "fused"

    def _refute(self, pattern: Pattern, trials: Trials, settings: Sequence[Setting], *, route: str = "graph") -> None:
        """The replacement is wrong: everywhere, or where a stronger guard could refuse it."""
        wrong = trials.of("wrong")
        everywhere = Trials([*self.alone.trials.made, *trials.made])
        divide = layouts.to_blame(everywhere) or self._divide(pattern, trials, settings)
        shown = counterexample([*self.alone.confirmed_as("wrong"), *wrong], pattern)
        outcome = shown.outcome
        self.worst_shown = outcome.worst_ulp, outcome.eager_ulp
        script = shown.written(self.effort, self.file_name, guilty=f"the replacement {self.label}")
        by = " through torch.compile" if route == "compile" else ""
        count = f"{len(wrong)} of {counted(len(wrong) + len(trials.of('right')), 'program')} in which it fused{by}"
        if divide is None:
            self._say("refuted", f"wrong in {count}: {outcome.failures[0]}", fails=True, script=script)
        else:
            self._say("guard-too-weak", f"{divide} ({count}): {outcome.failures[0]}", fails=True, script=script)

    def _blame_compiler(self, pattern: Pattern) -> None:
        """Programs that come out wrong without the rule, too, say nothing of it, and their finder should report them."""
        shown = counterexample(self.compiler_faults, pattern, without=True)
        script = shown.written(self.effort, f"{self.file_name}_compiler", guilty=None)
        found = counted(len(self.compiler_faults), "program")
        self._say(
            "compiler-fault", f"{found} came out wrong with the replacement switched off, too. That is a fault of npugraph_ex, "
            f"not of the replacement. Please report it, with the script. What is wrong: {shown.outcome.failures[0]}", fails=True,
            script=script,
        )  # fmt: skip


def _with_crashes(findings: tuple[ValidationFinding, ...], label: str) -> tuple[ValidationFinding, ...]:
    """The findings; the first one names what was left out because a process crashed there before."""
    found = crashes.current()
    left_out = "".join(f". Not tried is {crash.where}: {crash.message}" for crash in found.of_rule(label))
    if found.given_up(label) or not (left_out and findings):
        return findings
    sentence, line, address = findings[0].text.partition("\n")
    return replace(findings[0], text=f"{sentence.rstrip('.')}{left_out}{line}{address}"), *findings[1:]


def _ended(said: str) -> str:
    """A sentence with its full stop: below it may stand the address of an error."""
    sentence, line, address = said.partition("\n")
    return f"{sentence}.{line}{address}"
