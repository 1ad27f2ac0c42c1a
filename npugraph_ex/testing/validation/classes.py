"""The settings that decide: other numbers of dimensions, pairs of equal sizes, and sizes of one and of zero.

The matcher compares operators and their numbers, and `sum(x, 1)` is one operator for two dimensions and for three. A
replacement of `sum(x, -1)` by it is wrong for three alone, and only where the last two sizes are equal: elsewhere it would
change a shape, which is refused. So chance must not decide which sizes are tried together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from itertools import combinations

from npugraph_ex.fusion.rule import PreparedRule
from npugraph_ex.testing.generator.patterns import Pattern
from npugraph_ex.testing.validation.broadcasting import fused_where_it_runs, plainest
from npugraph_ex.testing.validation.eager import runs
from npugraph_ex.testing.validation.survey import Setting, Surveyed, example_setting
from npugraph_ex.testing.validation.trials import elements

_RANKS = 4
"""Up to so many dimensions are tried, and always one more than the examples have."""
_LEADING = (3, 2, 5, 7, 6, 9, 11, 13)
"""Sizes of dimensions that the examples do not have."""
ALIKE = (16, 5)
"""Sizes that all dimensions have together, where the last one's is too large for that; some guards want a multiple of 16."""
_MOST_ELEMENTS = 1 << 16
_MOST = 96
Key = object
"""Names dimensions that always have one size."""
Sized = tuple[tuple[tuple[Key, ...], ...], dict[Key, int]]
"""The dimensions of each argument, and their sizes."""


def base_of(pattern: Pattern, settings: Sequence[Setting]) -> Setting:
    """What other settings are varied from: the example's own if it is among the given ones and has no size of one."""
    own = example_setting(pattern)
    plain = own in settings and not any(1 in shape for shape in own.shapes)
    return own if plain else plainest(settings)


def deciding(prepared: PreparedRule, pattern: Pattern, settings: Sequence[Setting]) -> list[Surveyed]:
    """The settings of these classes in which eager mode runs the search function, and the rule fuses.

    None where it does not run in what is varied: what the rule's author did not mean says nothing then.

    Args:
        prepared: the rule.
        pattern: the same, as something to plant.
        settings: in which it fuses and which are small; these are not named again.
    """
    base, known = base_of(pattern, settings), set(settings)
    if not runs(pattern, base):
        return []
    shapes = dict.fromkeys(one for finer in (False, True) for one in _varied(_sized(pattern, base, finer=finer)))
    varied = (dataclasses.replace(base, shapes=one) for one in shapes)
    small = (one for one in varied if one not in known and elements(one) <= _MOST_ELEMENTS)
    return fused_where_it_runs(prepared, pattern, small, most=_MOST)


def has_no_elements(setting: Setting) -> bool:
    """Whether some size is zero."""
    return any(0 in shape for shape in setting.shapes)


def _sized(pattern: Pattern, base: Setting, *, finer: bool) -> Sized:
    """The base's dimensions by class; ``finer`` also tells equal places from the right, where one size may be chance."""
    keys = tuple(
        tuple(
            (dim, size, place - len(shape) if finer else 0)
            for place, (dim, size) in enumerate(zip(argument.dims, shape, strict=True))
        )
        for argument, shape in zip(pattern.arguments, base.shapes, strict=True)
    )
    return keys, {key: key[1] for row in keys for key in row}


def _varied(base: Sized) -> Iterator[tuple[tuple[int, ...], ...]]:
    """The shapes, those of the base's own dimensions first."""
    _, sizes = base
    for keys, given in (base, *_of_other_ranks(base)):
        named = list(dict.fromkeys(key for row in keys for key in row))
        yield _shapes(keys, given)
        for one, other in combinations(
            named, 2
        ):  # the later one's size: the last dimension is the one that must be a multiple
            yield _shapes(keys, {**given, one: given[other]})
        for size in (given[named[-1]], *ALIKE) if named else ():
            yield _shapes(keys, dict.fromkeys(named, size))
    for size in (1, 0):
        for key in sizes:
            yield _shapes(base[0], {**sizes, key: size})
    yield from _apart(base)


def _apart(base: Sized) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Sizes that are equal in several arguments are twice as large in some of these: there may be more keys than queries."""
    keys, sizes = base
    for key, size in sizes.items():
        having = [place for place, row in enumerate(keys) if key in row]
        for count in range(1, len(having)):
            for larger in combinations(having, count):
                yield tuple(
                    tuple(2 * size if one == key and place in larger else sizes[one] for one in row)
                    for place, row in enumerate(keys)
                )


def _of_other_ranks(base: Sized) -> Iterator[Sized]:
    """With more and fewer leading dimensions, for the arguments that have the most and for all."""
    keys, sizes = base
    most = max(map(len, keys))
    free = [size for size in _LEADING if size not in sizes.values()]
    for rank in range(max(_RANKS, most + 1) + 1):
        added = tuple(("leading", place) for place in range(rank - most))
        of_added: dict[Key, int] = dict(zip(added, free, strict=False))
        for only_most in (True, False):
            rows = tuple(
                row if only_most and len(row) < most else (*added, *row[max(0, most - rank) :]) for row in keys
            )
            if rows != keys:
                yield rows, {**sizes, **of_added}


def _shapes(keys: Sequence[Sequence[Key]], sizes: dict[Key, int]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(sizes[key] for key in row) for row in keys)
