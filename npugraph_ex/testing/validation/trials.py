"""Runs a replacement in random programs, and sorts the outcomes."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice, zip_longest
from typing import Any, Literal

from npugraph_ex.testing.crashes import CrashedError
from npugraph_ex.testing.generator.choices import Choices, Sampled
from npugraph_ex.testing.generator.inputs import Dim, Integers, size_of
from npugraph_ex.testing.generator.numbers import around
from npugraph_ex.testing.generator.patterns import Pattern
from npugraph_ex.testing.generator.program import Program
from npugraph_ex.testing.generator.shapes import FEWEST_ROWS, Spec
from npugraph_ex.testing.generator.sized_patterns import takes_other_rows
from npugraph_ex.testing.generator.strategies import planted_programs
from npugraph_ex.testing.oracle.case import Case, Outcome
from npugraph_ex.testing.oracle.checking import check
from npugraph_ex.testing.validation.eager import drawn_numbers, has_usual_numbers
from npugraph_ex.testing.validation.infinities import wrong_by_infinities
from npugraph_ex.testing.validation.integers import clashes, integer_ranges, is_indexable
from npugraph_ex.testing.validation.kinds import KINDS, KINDS_OF_OTHER_DTYPES, Kind, kind_of, leaves_ties, with_kind
from npugraph_ex.testing.validation.survey import Setting, computing, has_other_ranks

Fate = Literal[
    "right", "wrong", "not fused", "not runnable", "not judged", "not captured", "not finite", "wrong without it"
]
"""What is wrong without the rule, too, is the compiler's fault; what is not finite is wrong where the pattern reads infinities."""
_SMALL = 1 << 13
_SMALL_ODD = 3
"""Sizes up to it are usual ones: no block is as small."""
_ENOUGH_WRONG = 8
_AMONG_OTHERS = " in a random program"
"""Added to the setting in which a process crashed: the pattern alone does not crash there."""
_DYNAMIC_PERCENT = 25
_MOST_SETTINGS = 32
# None leaves magnitudes to the inputs and puts other operators before the pattern.
_SCALES = (1.0, None, 0.01, None, 0.001, None, 20.0, None)


@dataclass(frozen=True)
class Trial:
    """One program around the pattern, and its outcome; the program and its kind are None where the outcome is given."""

    setting: Setting
    case: Case
    outcome: Outcome
    fate: Fate
    program: Program | None = None
    kind: Kind | None = None


@dataclass
class Trials:
    """All trials of one replacement.

    Attributes:
        made: in the order in which they were run.
    """

    made: list[Trial] = field(default_factory=list)

    def of(self, fate: Fate) -> list[Trial]:
        """The trials with this outcome."""
        return [trial for trial in self.made if trial.fate == fate]


def computable(pattern: Pattern, settings: Sequence[Setting], *, most: int = _SMALL) -> list[Setting]:
    """Those of so few elements, the smallest first; the two smallest where none is so small, or one where none is defined."""
    by_size = sorted(settings, key=elements)
    small = [setting for setting in by_size if elements(setting) <= most] or by_size[:2]
    return [one for one in small if is_indexable(pattern, one) and not clashes(pattern, one)] or small[:1]


def runnable(pattern: Pattern, settings: Sequence[Setting]) -> list[Setting]:
    """The settings to compute with: small ones of every dtype; the smallest where none is small, or defined."""
    small = computable(pattern, settings)
    # Evenly over the sizes, the smallest first, which is what a failure shrinks to, and the largest, too.
    last, count = len(small) - 1, min(len(small), _MOST_SETTINGS)
    return [small[position * last // max(1, count - 1)] for position in range(count)]


def elements(setting: Setting) -> int:
    """How many numbers the arguments have."""
    return sum(math.prod(shape) for shape in setting.shapes)


def may_be_dynamic(pattern: Pattern, setting: Setting) -> bool:
    """Whether the leading size may be a symbol.

    Not where indices must differ, of which there must be as many as places, nor with a number that goes with the setting's sizes.
    """
    return (
        pattern.leading is not None
        and not has_other_ranks(pattern, setting)
        and has_usual_numbers(pattern, setting)
        and takes_other_rows(pattern, setting.shapes, setting.dtypes)
        and not any(one.distinct for one in integer_ranges(pattern, setting).values())
        and is_indexable(pattern, _at_fewest(setting, specs_of(pattern, setting, dynamic=True)))
    )


def specs_of(pattern: Pattern, setting: Setting, *, dynamic: bool) -> dict[str, Spec]:
    """Shape and dtype of each argument; the leading size is a symbol where ``dynamic``."""
    return {
        argument.name: (
            _shape(pattern, argument.dims, shape) if dynamic and place != setting.broadcasts else shape,
            dtype,
        )
        for place, (argument, shape, dtype) in enumerate(
            zip(pattern.arguments, setting.shapes, setting.dtypes, strict=True)
        )
    }


def ranges_of(pattern: Pattern, setting: Setting, specs: Mapping[str, Spec]) -> Mapping[str, Integers]:
    """The range of each integer argument: what an index may be where the symbol is smallest, it may be in every call."""
    return integer_ranges(pattern, _at_fewest(setting, specs))


def _at_fewest(setting: Setting, specs: Mapping[str, Spec]) -> Setting:
    """The setting in a call in which the symbol is smallest."""
    shapes = tuple(tuple(size_of(dim, {"s0": FEWEST_ROWS}) for dim in shape) for shape, _ in specs.values())
    return dataclasses.replace(setting, shapes=shapes)


def program_with(
    choices: Choices, pattern: Pattern, setting: Setting, scales: Sequence[float | None] = _SCALES
) -> Program:
    """A program with the pattern in it in this setting; its leading size may be a symbol."""
    dynamic = pattern.leading is not None and choices.chance(_DYNAMIC_PERCENT) and may_be_dynamic(pattern, setting)
    specs = specs_of(pattern, setting, dynamic=dynamic)
    scale = choices.pick(scales)
    make = planted_programs(
        pattern=pattern, dynamic=dynamic, exactly=specs, prefix=3 if scale is None else 0,
        integers=ranges_of(pattern, setting, specs), numbers=dict(setting.numbers),
    )  # fmt: skip
    # How often it must fuse is not known: the guard may refuse what the program's other sizes make of it.
    program = dataclasses.replace(make(choices), expected=None)
    return program if scale is None else _scaled(program, scale)


def _scaled(program: Program, scale: float) -> Program:
    """The program with inputs of one magnitude: an epsilon matters only where all that it is added to is small."""
    inputs = tuple(
        dataclasses.replace(x, scale=scale) if x.torch_dtype.is_floating_point else x for x in program.inputs
    )
    return dataclasses.replace(program, inputs=inputs)


def _shape(pattern: Pattern, dims: Sequence[int], shape: Sequence[int]) -> tuple[Dim, ...]:
    return tuple("s0" if dim == pattern.leading else size for dim, size in zip(dims, shape, strict=True))


def run_trials(  # noqa: PLR0913 - keyword arguments but for two
    pattern: Pattern,
    settings: Sequence[Setting],
    *,
    examples: int,
    seed: str,
    options: Mapping[str, Any],
    route: str = "graph",
    kinds: tuple[Kind, ...] = (),
    special: Sequence[tuple[float, ...]] = (),
    after_each: Callable[[float], object] | None = None,
) -> Trials:
    """Run so many programs, of every dtype as many; stop early once enough are wrong and some others have been seen.

    Their inputs are of several kinds in turn, of ``kinds`` alone where there are any. The first of each dtype has inputs near
    the numbers of the pattern and its replacement; its other values are of magnitude one.
    With ``special``, each has inputs among which are the values of one of these tuples in turn.
    """
    trials, of_group = Trials(), Counter(map(_group, settings))
    for number, setting in enumerate(islice(in_turn(settings, Choices(Sampled(seed))), examples)):
        choices = Choices(Sampled(f"{seed}:{number}"))
        if pattern.rule.scalars and not setting.numbers:
            setting = drawn_numbers(choices, pattern, setting)  # noqa: PLW2901 - what is run
        turn = number // len(of_group)
        usual = KINDS_OF_OTHER_DTYPES if setting.foreign else KINDS
        kind = kind_of(turn, of_group[_group(setting)], kinds or usual)
        several = turn and not special and kind in ("near", "plain") and not leaves_ties(pattern)
        program = program_with(choices, pattern, setting, _SCALES if several else _SCALES[:1])
        if special:
            program = around(program, special[turn % len(special)])
        else:
            program = with_kind(program, kind, pattern, choices, first=turn == 0)
        case = Case.of(program, route=route, options=options)
        made = Trial(setting, case, Outcome(), "not fused", program, kind)
        trials.made.append(tried(pattern, made, special=bool(special)))
        if after_each is not None:
            after_each((number + 1) / examples)
        if len(trials.of("wrong")) >= _ENOUGH_WRONG and len(trials.made) >= 3 * _ENOUGH_WRONG:
            break
    return trials


def tried(pattern: Pattern, trial: Trial, *, special: bool = False) -> Trial:
    """The trial with what comes of its program, of which some inputs are infinite or NaN if it is ``special``."""
    trial = tried_again(trial)
    if trial.fate != "wrong":
        return trial
    fate: Fate = "wrong"
    with computing(trial.setting, _AMONG_OTHERS):
        if wrong_without(trial.case, pattern):
            fate = "wrong without it"
        elif not special and trial.program and wrong_by_infinities(trial.program, trial.case):
            fate = "not finite"
    return dataclasses.replace(trial, fate=fate)


def tried_again(trial: Trial) -> Trial:
    """The trial with what comes of its case; it is not judged where that ended a process before."""
    try:
        with computing(trial.setting, _AMONG_OTHERS):
            outcome = check(trial.case)
    except CrashedError as error:
        return dataclasses.replace(trial, outcome=Outcome([str(error)]), fate="not judged")
    return dataclasses.replace(trial, outcome=outcome, fate=_fate(outcome))


def at_finite_inputs(trial: Trial) -> Trial:
    """The program of a trial with ``special`` values, run once more without these."""
    case = dataclasses.replace(
        trial.case, inputs=tuple(dataclasses.replace(one, around=()) for one in trial.case.inputs)
    )
    program = None if trial.program is None else around(trial.program, ())
    return tried_again(dataclasses.replace(trial, case=case, program=program))


def without_rule(case: Case, pattern: Pattern) -> Case:
    """The case with the rule switched off: what fails then, too, is not its fault."""
    rules = {**case.options.get("fusion_rules", {}), pattern.rule.name: False}
    return dataclasses.replace(case, options={**case.options, "fusion_rules": rules}, expected=None)


def wrong_without(case: Case, pattern: Pattern) -> bool:
    """Whether the case is wrong without the rule, too. That it cannot be captured without it excuses no wrong value."""
    return _fate(check(without_rule(case, pattern)), fused=True) == "wrong"


def in_turn(settings: Sequence[Setting], choices: Choices) -> Iterator[Setting]:
    """The settings in some order, over and over: dtypes alternate, and each setting comes before any comes again.

    Those in which an argument broadcasts, and those with an odd size, are every third one of their dtype until all have come:
    replacements that work in blocks are wrong in odd ones. The dtypes that are not those of the examples count as one.
    """
    kinds: dict[object, tuple[list[Setting], list[Setting], list[Setting]]] = {}
    for setting in choices.order(settings):
        kinds.setdefault(_group(setting), ([], [], []))[_turn(setting)].append(setting)
    rounds = [cycle([one for pair in zip_longest(*of_kind) for one in pair if one]) for of_kind in kinds.values()]
    while rounds:
        yield from map(next, rounds)


def _turn(setting: Setting) -> int:
    """Which of the three kinds of sizes it has."""
    if setting.broadcasts is not None:
        return 1
    return 2 * any(size % 2 and size > _SMALL_ODD for shape in setting.shapes for size in shape)


def _group(setting: Setting) -> object:
    """What alternates."""
    return "others" if setting.foreign else setting.dtypes


def _fate(outcome: Outcome, *, fused: bool = False) -> Fate:
    if outcome.ok:
        return "right" if outcome.fusions else "not fused"
    if not outcome.runnable:
        return "not runnable"
    raised = outcome.failures[0].startswith("raised ")
    if raised and any(name in outcome.failures[0] for name in ("ReferenceUnavailable", "KernelMissing")):
        return "not judged"
    if raised and "CaptureError" in outcome.failures[0].split(":")[0]:
        return "not captured"
    if raised or fused or outcome.fusions or "rolled back" in outcome.failures[0]:
        return "wrong"
    return "not fused"
