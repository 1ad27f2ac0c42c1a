"""What a maker of random spellings draws."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

ROWS = 4


@dataclass(frozen=True)
class Spelling:
    """A drawn program.

    Attributes:
        form: of lifting, which it spells.
        lines: of its body; the last one is the result.
        shapes: of its inputs x0, x1, ...
        near_miss: the part that is wrong; empty for a spelling.
        alone: whether the operator would save nothing if something on the way had another user.
        writes: whether a line changes an input, so that in-place operators stay.
        declared: whether it is lifted only where the user declares that each row attends.
        device: whose name the emulated device has; empty for its own. Some operators are not on each.
        by: the operator that takes its place, where a part of it is a spelling of another one; of a near-miss, that may not.
        told: whether it is a near-miss of which the report must say why it stays, because many programs are written so.
    """

    form: str
    lines: tuple[str, ...]
    shapes: tuple[tuple[int | str, ...], ...]
    near_miss: str = ""
    alone: bool = False
    writes: bool = False
    declared: bool = False
    told: bool = False
    device: str = ""
    by: str = ""


def times(draw: random.Random, one: str, other: str) -> str:
    """A product; ``one`` has its shape."""
    added_to_zeros = f"torch.addcmul(torch.zeros_like({one}), {one}, {other})"
    return draw.choice((f"{one} * {other}", f"{other} * {one}", f"{one} * {other}", added_to_zeros))


def plus_times(draw: random.Random, added: str, one: str, other: str, sign: str = "+") -> str:
    """A product that is added to something, or subtracted from it; by one operator, too."""
    value = "" if sign == "+" else ", value=-1"
    together = f"torch.addcmul({added}, {one}, {other}{value})"
    behind = f"{one} * {other} + {added}" if sign == "+" else f"-{one} * {other} + {added}"
    return draw.choice((f"{added} {sign} {one} * {other}", f"{added} {sign} {other} * {one}", behind, together))


def product_of(draw: random.Random, factors: Sequence[str]) -> str:
    """The product of all factors, in any order and with any parentheses."""
    left = list(factors)
    while len(left) > 1:
        draw.shuffle(left)
        left.append(f"({left.pop()} * {left.pop()})")
    return left[0]
