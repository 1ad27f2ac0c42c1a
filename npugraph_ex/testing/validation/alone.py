"""Computes a pattern alone, with nothing around it, once in every class of arguments that may decide whether a rule is right.

Random programs find what nobody foresaw, and the more of them the more. Whether a class that is known to decide is tried at all
must not depend on chance: sizes, dtypes, numbers of dimensions, layouts, numbers, kinds of values. Here each has its turn, and
the turns are the same for every seed. One costs a tenth of a random program: nothing is captured, and no other pass runs.
What comes out wrong is then a program as the random ones are, and checked as they are.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, cycle, islice
from typing import Any

import torch
from torch import fx

from npugraph_ex.fusion.engine import apply_rules
from npugraph_ex.fusion.rule import PreparedRule
from npugraph_ex.report.builder import ReportBuilder
from npugraph_ex.report.passes import PassReport
from npugraph_ex.testing.generator.choices import Choices, Sampled
from npugraph_ex.testing.generator.inputs import LAYOUTS, Input, Integers, Layout, limits_of
from npugraph_ex.testing.generator.numbers import around, numbers_for
from npugraph_ex.testing.generator.patterns import Pattern
from npugraph_ex.testing.generator.planted import renamed
from npugraph_ex.testing.generator.program import Program
from npugraph_ex.testing.generator.sized_patterns import sized
from npugraph_ex.testing.generator.strategies import FEWEST_ROWS, Spec
from npugraph_ex.testing.oracle import tracing
from npugraph_ex.testing.oracle.case import Case, Outcome
from npugraph_ex.testing.oracle.checking import check_optimised
from npugraph_ex.testing.validation.classes import base_of
from npugraph_ex.testing.validation.infinities import wrong_by_infinities
from npugraph_ex.testing.validation.kinds import KINDS, Kind, with_kind
from npugraph_ex.testing.validation.survey import Setting
from npugraph_ex.testing.validation.trials import (
    Fate,
    Trial,
    Trials,
    in_turn,
    may_be_dynamic,
    ranges_of,
    specs_of,
    tried,
)

_LAYOUTS: tuple[Layout, ...] = (*LAYOUTS[1:], "inside", "expanded")
_DENSE: tuple[Layout, ...] = ("offset", "inside")
"""Those of patterns of more than rows: such a pattern may contain a view, which the others do not have."""
_VALUES: tuple[tuple[Kind, float], ...] = (
    ("near", 1.0), ("few", 1.0), ("large", 1.0), ("large", 2.0), ("plain", 0.001), ("plain", 0.01), ("plain", 20.0),
)  # fmt: skip
"""Kinds of values, and magnitudes; those of ``large`` only tell two draws of it apart."""
_VALUES_OF_INTEGERS: tuple[tuple[Kind, float], ...] = (("large", 1.0), ("few", 1.0), ("near", 1.0))
_SPECIAL = ((float("-inf"),), (float("inf"),), (float("nan"),), (float("-inf"), float("inf")))
_CONFIRMED = 6
"""So many of the wrong are checked as random programs are; if all are wrong then, too, the others need not be."""


@dataclass(frozen=True)
class Turn:
    """What is computed once.

    Attributes:
        classes: what it is tried for, in words.
        setting: of the arguments.
        kind: of values.
        scale: their magnitude.
        layouts: of some arguments, by name.
        numbers: the numeric arguments that are not the given ones.
        dynamic: whether the leading size is a symbol.
        same: the name of an argument that is another one, too, by that one's name.
        special: the infinities and NaN among the values.
        seed: of the values.
    """

    classes: tuple[str, ...]
    setting: Setting
    kind: Kind = "growing"
    scale: float = 1.0
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)
    dynamic: bool = False
    same: Mapping[str, str] = field(default_factory=dict)
    special: tuple[float, ...] = ()
    seed: int = 0


def turns_of(pattern: Pattern, settings: Sequence[Setting]) -> list[Turn]:
    """All turns in the settings, which fuse and are small; the same for every seed."""
    base = base_of(pattern, settings)
    return [
        *_of_values(base, settings),
        *(Turn(_classes(base, setting), setting) for setting in settings),
        *_of_layouts(pattern, base),
        *_of_numbers(pattern, base),
        *([Turn(("a size that is a symbol",), base, dynamic=True)] if may_be_dynamic(pattern, base) else []),
        *_of_one_tensor(pattern, base),
    ]


def special_turns_of(pattern: Pattern, settings: Sequence[Setting]) -> list[Turn]:
    """The turns with an infinity or a NaN among the values, of the dtypes that are not foreign."""
    bases = _of_each_dtype(base_of(pattern, settings), [one for one in settings if not one.foreign])
    return [Turn(("infinities and NaN",), base, "plain", special=special) for base in bases for special in _SPECIAL]


def _of_values(base: Setting, settings: Sequence[Setting]) -> Iterator[Turn]:
    """Each dtype with values of every kind."""
    for setting in _of_each_dtype(base, settings):
        floating = any(dtype.is_floating_point for dtype in setting.dtypes)
        for kind, scale in _VALUES if floating and not setting.foreign else _VALUES_OF_INTEGERS:
            yield Turn(_classes(base, setting), setting, kind, scale)


def _values_of(kinds: tuple[Kind, ...]) -> Sequence[tuple[Kind, float]]:
    """The kinds of values, all of them where none is named, with their magnitudes."""
    every = (*_VALUES, *((kind, 1.0) for kind in KINDS if kind not in dict(_VALUES)))
    return [one for one in every if one[0] in kinds] or every


def _of_each_dtype(base: Setting, settings: Sequence[Setting]) -> list[Setting]:
    """For each dtype the setting with the base's sizes, or the first."""
    found: dict[tuple[torch.dtype, ...], Setting] = {}
    for setting in settings:
        if setting.broadcasts is None and (setting.dtypes not in found or setting.shapes == base.shapes):
            found[setting.dtypes] = setting
    return list(found.values())


def _classes(base: Setting, setting: Setting) -> tuple[str, ...]:
    """What is special about a setting."""
    found = [
        f"the dtype {str(dtype).removeprefix('torch.')}"
        for dtype, usual in zip(setting.dtypes, base.dtypes, strict=True)
        if dtype != usual
    ]
    if setting.broadcasts is not None:
        found.append("an argument that broadcasts")
    ranks, usual_ranks = ([len(shape) for shape in one.shapes] for one in (setting, base))
    if ranks != usual_ranks and setting.broadcasts is None:
        found.append(f"{max(ranks)} dimensions")
    found += [f"a size of {size}" for size in (0, 1) if any(size in shape for shape in setting.shapes)]
    if any(one == other for shape in setting.shapes for one, other in combinations(shape, 2)):
        found.append("equal sizes")
    return tuple(dict.fromkeys(found)) or ("other sizes",)


def _of_layouts(pattern: Pattern, base: Setting) -> Iterator[Turn]:
    """All arguments lie in memory in one of the ways, and each alone."""
    names = [argument.name for argument in pattern.arguments]
    for layout in _LAYOUTS if pattern.rows else _DENSE:
        for moved in dict.fromkeys(((*names,), *((name,) for name in names))):
            yield Turn((f"{layout} memory",), base, layouts=dict.fromkeys(moved, layout))


def _of_numbers(pattern: Pattern, base: Setting) -> Iterator[Turn]:
    """Each number has each of its values, and all numbers another one together."""
    others = {name: numbers_for(pattern, given)[1:] for name, given in pattern.rule.scalars.items()}
    for name, values in others.items():
        for value in values:
            yield Turn((f"another {name}",), base, "near", numbers={name: value})
    if len(others) > 1:
        for values in zip(*others.values(), strict=False):
            yield Turn(("other numbers together",), base, "near", numbers=dict(zip(others, values, strict=True)))


def _of_one_tensor(pattern: Pattern, base: Setting) -> Iterator[Turn]:
    """Two arguments are one tensor."""
    alike = zip(pattern.arguments, base.shapes, base.dtypes, strict=True)
    for (one, *what), (other, *same) in combinations(alike, 2):
        if what == same:
            yield Turn(("one tensor as two arguments",), base, same={other.name: one.name})


# -- running them ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Graphs:
    """A program's graph, the one that the rule makes of it, and the report of that."""

    traced: fx.GraphModule
    optimised: fx.GraphModule
    report: PassReport

    def outcome_of(self, case: Case) -> Outcome:
        """What comes of a case of the program; an error of either graph is a failure."""
        try:
            return check_optimised(case, self.traced, self.optimised, self.report)
        except Exception as error:  # noqa: BLE001 - whatever a kernel raises
            return Outcome([f"raised {type(error).__name__}: {error}"], self.report.fusions())


@dataclass
class Bench:
    """Runs turns of one rule: not captured, and through no other pass. Turns that differ in values alone share their graphs.

    Attributes:
        prepared: the rule.
        pattern: the same, as something to plant.
        options: of the programs that are checked as random ones are.
        graphs: of the turns so far.
        seeds: how many turns had new values.
    """

    prepared: PreparedRule
    pattern: Pattern
    options: Mapping[str, Any]
    graphs: dict[object, _Graphs] = field(default_factory=dict)
    seeds: int = 0

    def trial(self, turn: Turn) -> Trial | None:
        """One turn; None where the search function does not take it, or nothing fuses."""
        try:
            program = _program(self.pattern, turn)
            case = Case.of(program, options=self.options)
            graphs = self._graphs_of(program, case)
        except Exception:  # noqa: BLE001 - a user's function raises what it likes about numbers and layouts
            return None
        if not graphs.report.fusions():
            return None
        outcome = graphs.outcome_of(case)
        fate: Fate = "right" if outcome.ok else "wrong"
        computed = fate == "wrong" and not outcome.failures[0].startswith("raised ")
        if computed and not turn.special and wrong_by_infinities(program, case, graphs.outcome_of):
            fate = "not finite"
        return Trial(turn.setting, case, outcome, fate, program, turn.kind)

    def again(self, settings: Sequence[Setting], seed: str, examples: int, kinds: tuple[Kind, ...]) -> Trials:
        """So many turns in these settings, with new values of these kinds; of all kinds where there are none."""
        drawn = islice(in_turn(settings, Choices(Sampled(seed))), examples)
        turns = (
            Turn((), setting, *values, seed=self.seeds + number)
            for number, (setting, values) in enumerate(zip(drawn, cycle(_values_of(kinds)), strict=False), 1)
        )
        made = [trial for turn in turns if (trial := self.trial(turn)) is not None]
        self.seeds += examples
        return Trials(made)

    def _graphs_of(self, program: Program, case: Case) -> _Graphs:
        key = (program.source, program.dynamic, *((x.shape, x.dtype, x.layout, x.alias_of) for x in program.inputs))
        if key not in self.graphs:
            traced = tracing.trace(
                case.function(), case.inputs, case.sizes[0], dynamic=case.dynamic, functional=case.functional
            )
            optimised, report = tracing.copy_of(traced), ReportBuilder()
            apply_rules(optimised.graph, (self.prepared,), report)
            optimised.recompile()
            self.graphs[key] = _Graphs(traced, optimised, report.build())
        return self.graphs[key]


@dataclass
class Alone:
    """What came of the turns.

    Attributes:
        trials: all in which the rule fused, and that could be run.
        confirmed: those that were wrong, and were checked as random programs are.
        left_out: each class of which no turn could be judged although the rule fuses there, with the reason.
    """

    trials: Trials = field(default_factory=Trials)
    confirmed: list[Trial] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    def confirmed_as(self, fate: Fate) -> list[Trial]:
        """Those that were checked as random programs are, with this outcome."""
        return [trial for trial in self.confirmed if trial.fate == fate]

    def told(self) -> str:
        """The end of a sentence about what was tried, with what could not be."""
        judged = len(self.trials.of("right")) + len(self.trials.of("not finite"))
        missing = "".join(f". Not tried is {name}: {why.splitlines()[0]}" for name, why in self.left_out.items())
        return f"; and {judged} times alone, in every class of arguments{missing}" if judged else missing


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
    found = Alone(confirmed=list(confirmed.values()))
    for turn, trial in made:
        found.trials.made.append(settled(trial))
        for name in turn.classes:
            seen[name].append(found.trials.made[-1])
    for name, trials in seen.items():
        if all(trial.fate in {"not judged", "not captured"} for trial in trials):
            found.left_out[name] = trials[0].outcome.failures[0]
    return found


def _program(pattern: Pattern, turn: Turn) -> Program:
    """The pattern, with the turn's arguments."""
    specs = specs_of(pattern, turn.setting, dynamic=turn.dynamic)
    ranges = ranges_of(pattern, turn.setting, specs)
    sizes = ({"s0": FEWEST_ROWS}, {"s0": FEWEST_ROWS + 1}) if turn.dynamic else ({}, {})
    filled = sized(
        pattern, {name: shape for name, (shape, _) in specs.items()}, {name: dtype for name, (_, dtype) in specs.items()},
        {**pattern.rule.scalars, **turn.numbers}, sizes[0],
    )  # fmt: skip
    if turn.dynamic and filled.burnt_in:
        raise ValueError("its steps contain numbers that other sizes would change")
    traced = filled.traced
    names = {name: f"x{place}" for place, name in enumerate(specs)}
    names |= {name: f"p0_{name}" for name in traced.metas}
    places = {name: place for place, name in enumerate(specs)}
    inputs: list[Input] = []
    for name, spec in specs.items():
        twin = places.get(turn.same.get(name, ""))
        layout = turn.layouts.get(name, "contiguous")
        inputs.append(
            _input(spec, ranges.get(name), layout, turn.scale, turn.seed * len(specs) + len(inputs))
            if twin is None
            else dataclasses.replace(inputs[twin], alias_of=twin)
        )
    program = Program(
        inputs=tuple(inputs), steps=tuple(renamed(step, names) for step in traced.steps),
        outputs=tuple(dict.fromkeys(names[name] for name in traced.outputs)), sizes=sizes, dynamic=turn.dynamic,
        pattern=pattern.name,
    )  # fmt: skip
    if turn.special:
        # Some rows of a mask are all true: what is left of them may be NaN for finite values, too.
        inputs = [dataclasses.replace(x, whole=1) if x.torch_dtype == torch.bool else x for x in program.inputs]
        return around(dataclasses.replace(program, inputs=tuple(inputs)), turn.special)
    choices = Choices(Sampled(f"{turn.kind} {turn.scale} {turn.seed}"))
    return with_kind(program, turn.kind, pattern, choices, first=True)


def _input(spec: Spec, within: Integers | None, layout: Layout, scale: float, seed: int) -> Input:
    """One argument; integers are within what it takes, often at an end."""
    shape, dtype = spec
    if layout == "expanded" and within is not None and within.distinct:
        layout = "contiguous"
    made = Input(shape, str(dtype).removeprefix("torch."), layout, seed=seed, scale=scale)
    if within is None:
        return made
    below = None if within.most == limits_of(dtype)[1] else within.most + 1
    ends = () if below is None else (float(within.least), -1.0, 0.0, float(within.most))
    return dataclasses.replace(made, below=below, around=ends, least=within.least, distinct=within.distinct)
