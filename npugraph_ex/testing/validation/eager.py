"""What eager mode runs: a pattern's settings, and the numbers that its numeric arguments may be there."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from itertools import islice, product

import torch

from npugraph_ex.fusion.rules import RULE_NAMES
from npugraph_ex.testing.generator.choices import Choices
from npugraph_ex.testing.generator.numbers import numbers_at_sizes, numbers_for
from npugraph_ex.testing.generator.patterns import Pattern
from npugraph_ex.testing.validation.integers import clashes, integer_ranges, is_indexable
from npugraph_ex.testing.validation.survey import Setting, arguments_of, computing

_MOST_TURNS = 24
_MOST_ELEMENTS = 1 << 16
_AT_SIZES_PERCENT = 30
_ATTEMPTS = 3


def random_tensors(pattern: Pattern, setting: Setting) -> list[torch.Tensor]:
    """Arguments for the search function itself, on the device; an integer is the largest that its argument takes, or zero."""
    ranges = integer_ranges(pattern, setting)
    numbers = [ranges[one.name].most if one.name in ranges else 0 for one in pattern.arguments]
    return [
        (torch.randn(shape) if dtype.is_floating_point else torch.full(shape, number)).to("npu", dtype)
        for number, shape, dtype in zip(numbers, setting.shapes, setting.dtypes, strict=True)
    ]


def runs(pattern: Pattern, setting: Setting) -> bool:
    """Whether eager mode runs the search function there, and each integer can be some number, and no two indices must clash."""
    if not is_indexable(pattern, setting) or clashes(pattern, setting):
        return False
    try:
        with computing(setting):
            pattern.rule.search(*arguments_of(pattern, random_tensors(pattern, setting), setting.numbers))
    except Exception:  # noqa: BLE001 - a user's function raises what it likes about sizes that it does not take
        return False
    return True


def settings_at_sizes(pattern: Pattern, setting: Setting) -> Mapping[str, list[Setting]]:
    """For each whole-number argument, the setting with it at and around each size of the tensors, where eager mode runs.

    ``x.roll(k)`` by two slices is wrong only where k exceeds the size.
    """
    given, sizes = pattern.rule.scalars, _sizes(setting)
    found = {name: numbers_at_sizes(pattern, number, sizes) for name, number in given.items()}
    most = _MOST_TURNS // max(1, sum(map(bool, found.values())))
    return {
        name: [
            one
            for number in numbers[:most]
            if _runs_small(pattern, one := with_numbers(pattern, setting, {name: number}))
        ]
        for name, numbers in found.items()
    }


def settings_of_dimensions(pattern: Pattern, setting: Setting) -> list[Setting]:
    """The setting with each choice of dimensions as the whole numbers of the rule; itself where there are none.

    At most so many choices run, the first ones of their order: five arguments of five dimensions would have thousands.
    """
    whole = [name for name, one in pattern.rule.scalars.items() if isinstance(one, int) and not isinstance(one, bool)]
    if not whole or pattern.name in RULE_NAMES:
        return [setting]
    dimensions = range(max(map(len, setting.shapes)))
    chosen = (dict(zip(whole, numbers, strict=True)) for numbers in product(dimensions, repeat=len(whole)))
    run = (one for numbers in chosen if _runs_small(pattern, one := with_numbers(pattern, setting, numbers)))
    return list(islice(run, _MOST_TURNS))


def with_numbers(pattern: Pattern, setting: Setting, numbers: Mapping[str, float]) -> Setting:
    """The setting with these numeric arguments; the others are those given, if it has no others."""
    return dataclasses.replace(
        setting, numbers=tuple({**pattern.rule.scalars, **dict(setting.numbers), **numbers}.items())
    )


def drawn_numbers(choices: Choices, pattern: Pattern, setting: Setting) -> Setting:
    """The setting with numbers for a random program: as anywhere, and now and then a whole one at or around a size."""
    given = pattern.rule.scalars
    usual = with_numbers(
        pattern, setting, {name: choices.pick(numbers_for(pattern, one)) for name, one in given.items()}
    )
    whole = {name: number for name, number in given.items() if isinstance(number, int)}
    if any(dict(usual.numbers)[name] != number for name, number in whole.items()) and not _runs_small(pattern, usual):
        usual = with_numbers(pattern, usual, whole)
    at_sizes = {
        name: found for name, one in given.items() if (found := numbers_at_sizes(pattern, one, _sizes(setting)))
    }
    if at_sizes and choices.chance(_AT_SIZES_PERCENT):
        for _ in range(_ATTEMPTS):
            name = choices.pick(list(at_sizes))
            other = with_numbers(pattern, usual, {name: choices.pick(at_sizes[name])})
            if _runs_small(pattern, other):
                return other
    return usual


def has_usual_numbers(pattern: Pattern, setting: Setting) -> bool:
    """Whether no number is at or around one of the sizes alone."""
    given = pattern.rule.scalars
    return all(number in numbers_for(pattern, given[name]) for name, number in setting.numbers)


def _sizes(setting: Setting) -> list[int]:
    """The sizes of the arguments, those of the last dimensions first."""
    return [size for shape in setting.shapes for size in reversed(shape)]


def _runs_small(pattern: Pattern, setting: Setting) -> bool:
    """Whether eager mode runs there and no result is large, as one that is repeated so often may be."""
    names = [argument.name for argument in pattern.arguments]
    shapes, dtypes = dict(zip(names, setting.shapes, strict=True)), dict(zip(names, setting.dtypes, strict=True))
    most = max(_MOST_ELEMENTS, 2 * sum(map(math.prod, setting.shapes)))
    try:
        metas = pattern.trace(shapes, dtypes, dict(setting.numbers)).metas
    except Exception:  # noqa: BLE001 - as above
        return False
    return all(math.prod(shape) <= most for shape, _ in metas.values()) and runs(pattern, setting)
