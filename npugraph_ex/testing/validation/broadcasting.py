"""Settings in which arguments broadcast against each other, where their sizes agree in the rule's examples.

The matcher compares operators, and most of them broadcast: where the search function adds two tensors of one shape, it
matches a row that is added to each row of a matrix, too. Few fused operators take that.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from npugraph_ex.fusion.rule import PreparedRule
from npugraph_ex.testing.generator.patterns import Pattern
from npugraph_ex.testing.validation.eager import runs
from npugraph_ex.testing.validation.survey import Setting, Surveyed, asked

_MOST = 8


def broadcasting(prepared: PreparedRule, pattern: Pattern, settings: Sequence[Setting]) -> list[Surveyed]:
    """The settings in which one argument broadcasts, eager mode runs the search function, and the rule fuses.

    Args:
        prepared: the rule.
        pattern: the same, as something to plant.
        settings: in which it fuses; the plainest is varied.
    """
    return fused_where_it_runs(prepared, pattern, _varied(plainest(settings)))


def plainest(settings: Sequence[Setting]) -> Setting:
    """The smallest setting of those with the fewest sizes of 1."""
    return min(settings, key=lambda setting: (_ones(setting), sum(map(math.prod, setting.shapes))))


def fused_where_it_runs(
    prepared: PreparedRule, pattern: Pattern, settings: Iterable[Setting], *, most: int = _MOST
) -> list[Surveyed]:
    """The first ``most`` of these settings in which the rule fuses and eager mode runs the search function."""
    answers = (asked(prepared, pattern, one) for one in settings if runs(pattern, one))  # the matcher takes longer
    fused = (answer for answer in answers if answer.answer == "fused")
    return list(islice(fused, most))


def _ones(setting: Setting) -> int:
    return sum(shape.count(1) for shape in setting.shapes)


def _varied(base: Setting) -> Iterator[Setting]:
    """With a leading size of 1, and without that dimension, for each argument of whose sizes another one has them all."""
    for place, shape in enumerate(base.shapes):
        others = (*base.shapes[:place], *base.shapes[place + 1 :])
        if shape and any(other[-len(shape) :] == shape for other in others):
            for less in sorted({(1, *shape[1:]), shape[1:] or (1,)} - {shape}):
                shapes = (*base.shapes[:place], less, *base.shapes[place + 1 :])
                yield dataclasses.replace(base, shapes=shapes, broadcasts=place)
