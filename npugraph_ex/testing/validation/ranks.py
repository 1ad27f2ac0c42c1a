"""Settings in which arguments have another number of dimensions than in the rule's examples.

The matcher compares operators and their numbers, and `softmax(x, 1)` is one operator for two dimensions and for three. A
replacement that names the last dimension instead is right for the examples alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from npugraph_ex.fusion.rule import PreparedRule
from npugraph_ex.testing.generator.patterns import Pattern
from npugraph_ex.testing.validation.broadcasting import fused_where_it_runs, plainest
from npugraph_ex.testing.validation.survey import Setting, Surveyed

_ROWS = 3
_MOST_ELEMENTS = 1 << 18


def other_ranks(prepared: PreparedRule, pattern: Pattern, settings: Sequence[Setting]) -> list[Surveyed]:
    """The settings with a dimension more or less in which eager mode runs the search function, and the rule fuses.

    Args:
        prepared: the rule.
        pattern: the same, as something to plant.
        settings: in which it fuses.
    """
    return fused_where_it_runs(prepared, pattern, _varied(plainest(settings)))


def _varied(base: Setting) -> Iterator[Setting]:
    """With a leading dimension more, for the arguments that have the most and for all; with one less for the former.

    Then the same with one size everywhere: where sizes differ, a result over a wrong dimension has a shape that is refused.
    """
    most = max(map(len, base.shapes))
    ways = [
        tuple((_ROWS, *shape) if len(shape) == most else shape for shape in base.shapes),
        tuple((_ROWS, *shape) for shape in base.shapes),
    ]
    if most > 1:
        ways.append(tuple(shape[1:] if len(shape) == most else shape for shape in base.shapes))
    size = next(shape[-1] for shape in base.shapes if len(shape) == most) if most else 1
    if size ** (most + 1) <= _MOST_ELEMENTS:
        ways += [tuple((size,) * len(shape) for shape in shapes) for shapes in ways]
    for shapes in dict.fromkeys(ways):
        yield dataclasses.replace(base, shapes=shapes)
