"""The turns of a pattern alone: once in every class of arguments that may decide whether a rule is right.

Random programs find what nobody foresaw, and the more of them the more. Whether a class that is known to decide is tried at all
must not depend on chance: sizes, dtypes, numbers of dimensions, layouts, numbers, kinds of values. Here each has its turn, and
the turns are the same for every seed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, combinations

import torch

from npugraph_ex.testing.generator.choices import Choices, Sampled
from npugraph_ex.testing.generator.fills import infinities_for
from npugraph_ex.testing.generator.inputs import EXPANDED, LAYOUTS, Input, Integers, Layout
from npugraph_ex.testing.generator.numbers import around, numbers_for
from npugraph_ex.testing.generator.patterns import Pattern
from npugraph_ex.testing.generator.planted import renamed
from npugraph_ex.testing.generator.program import Program
from npugraph_ex.testing.generator.shapes import FEWEST_ROWS, Spec
from npugraph_ex.testing.generator.sized_patterns import sized
from npugraph_ex.testing.validation.classes import ALIKE, base_of
from npugraph_ex.testing.validation.eager import settings_at_sizes, settings_of_dimensions, with_numbers
from npugraph_ex.testing.validation.kinds import KINDS, Kind, with_kind
from npugraph_ex.testing.validation.survey import Setting
from npugraph_ex.testing.validation.trials import elements, may_be_dynamic, ranges_of, specs_of

_LAYOUTS: tuple[Layout, ...] = (*LAYOUTS[1:], "inside", "expanded")
_DENSE: tuple[Layout, ...] = ("offset", "inside")
"""Those of patterns of more than rows: such a pattern may contain a view, which the others do not have."""
_VALUES: tuple[tuple[Kind, float], ...] = (
    ("near", 1.0), ("few", 1.0), ("large", 1.0), ("large", 2.0), ("plain", 0.001), ("plain", 0.01), ("plain", 20.0),
    ("rows", 1.0),
)  # fmt: skip
"""Kinds of values, and magnitudes; those of ``large`` only tell two draws of it apart."""
_VALUES_OF_INTEGERS: tuple[tuple[Kind, float], ...] = (("large", 1.0), ("few", 1.0), ("near", 1.0), ("rows", 1.0))
_MOST_ELEMENTS = 1 << 13
"""Of a setting that is made to have equal sizes."""
_SPECIAL = ((float("-inf"),), (float("inf"),), (float("nan"),), (float("-inf"), float("inf")))


@dataclass(frozen=True)
class Turn:
    """What is computed once.

    Attributes:
        classes: what it is tried for, in words.
        setting: of the arguments.
        kind: of values.
        scale: their magnitude.
        layouts: of some arguments, by name.
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
        *_of_equal_sizes(pattern, base, settings),
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


def values_of(kinds: tuple[Kind, ...]) -> Sequence[tuple[Kind, float]]:
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
    """Each number has each of its values, and all numbers another one together.

    Those that fill places are infinite, too, and whole ones at and around each size.
    """
    others = {name: numbers_for(pattern, given)[1:] for name, given in pattern.rule.scalars.items()}
    for name, values in others.items():
        for value in values:
            yield Turn((f"another {name}",), with_numbers(pattern, base, {name: value}), "near")
    if len(others) > 1:
        for values in zip(*others.values(), strict=False):
            together = with_numbers(pattern, base, dict(zip(others, values, strict=True)))
            yield Turn(("other numbers together",), together, "near")
    for name in others:
        for number in infinities_for(pattern, name):
            yield Turn((f"an infinite {name}",), with_numbers(pattern, base, {name: number}))
    for name, settings in settings_at_sizes(pattern, base).items():
        for setting in settings:
            yield Turn((f"{name} around a size",), setting)


def _of_equal_sizes(pattern: Pattern, base: Setting, settings: Sequence[Setting]) -> Iterator[Turn]:
    """All sizes are equal, and the memory lies in each way, with each choice of dimensions as the whole numbers.

    Elsewhere a wrong order of dimensions changes a shape, or strides, which the matcher refuses. Where all sizes are equal and all
    strides but one are 0, neither changes.
    """
    cubes = [one for one in settings if one.dtypes == base.dtypes and _is_cube(one) and _has_ranks_of(one, base)]
    if not cubes:  # in contiguous memory the rule fuses in none
        made = [
            dataclasses.replace(base, shapes=tuple((size,) * len(shape) for shape in base.shapes)) for size in ALIKE
        ]
        cubes = [one for one in made if elements(one) <= _MOST_ELEMENTS]
    layouts: tuple[Layout, ...] = ("contiguous", "transposed", *EXPANDED)
    for cube in sorted(cubes, key=elements)[:1]:
        for numbered in settings_of_dimensions(pattern, cube):
            for layout in layouts:
                moved = {} if layout == "contiguous" else {one.name: layout for one in pattern.arguments}
                yield Turn(("equal sizes and the order of dimensions",), numbered, layouts=moved)


def _is_cube(setting: Setting) -> bool:
    """Whether there is one size, above one."""
    sizes = {*chain(*setting.shapes)}
    return len(sizes) == 1 and max(sizes) > 1


def _has_ranks_of(setting: Setting, base: Setting) -> bool:
    """Whether each argument has as many dimensions as in the base."""
    return list(map(len, setting.shapes)) == list(map(len, base.shapes))


def _of_one_tensor(pattern: Pattern, base: Setting) -> Iterator[Turn]:
    """Two arguments are one tensor."""
    alike = zip(pattern.arguments, base.shapes, base.dtypes, strict=True)
    for (one, *what), (other, *same) in combinations(alike, 2):
        if what == same:
            yield Turn(("one tensor as two arguments",), base, same={other.name: one.name})


def program_of(pattern: Pattern, turn: Turn) -> Program:
    """The pattern, with the turn's arguments."""
    specs = specs_of(pattern, turn.setting, dynamic=turn.dynamic)
    ranges = ranges_of(pattern, turn.setting, specs)
    sizes = ({"s0": FEWEST_ROWS}, {"s0": FEWEST_ROWS + 1}) if turn.dynamic else ({}, {})
    filled = sized(
        pattern, {name: shape for name, (shape, _) in specs.items()}, {name: dtype for name, (_, dtype) in specs.items()},
        {**pattern.rule.scalars, **dict(turn.setting.numbers)}, sizes[0],
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
    if layout in EXPANDED and within is not None and within.distinct:
        layout = "contiguous"
    made = Input(shape, str(dtype).removeprefix("torch."), layout, seed=seed, scale=scale)
    return made if within is None else made.within(within)
