"""The sizes of a program's calls, and the shapes and dtypes of a pattern's arguments."""

from __future__ import annotations

import torch

from npugraph_ex.fusion.rules import SIXTEEN_BITS, operands_of
from npugraph_ex.testing.generator.builder import Builder
from npugraph_ex.testing.generator.inputs import Dim
from npugraph_ex.testing.generator.patterns import Pattern

CALLS = 4
_MULTIPLES = (4, 2, 8, 1)
FEWEST_ROWS = 2
_ROWS = (FEWEST_ROWS, 3, 5, 6, 7)
_LARGE = 64
Spec = tuple[tuple[Dim, ...], torch.dtype]
"""Shape and dtype of an argument of a pattern."""


def sizes_of_calls(builder: Builder, *, dynamic: bool, zero: bool) -> tuple[dict[str, int], ...]:
    """The values of s0 and s1 in each call. In one call all differ, so that no two sizes are equal by accident."""
    if dynamic:
        # Two calls share their sizes: the second of them replays what the first captured.
        first, second = builder.choices.order(_ROWS), builder.choices.order(_ROWS)
        rows = (first, second, first, first)
        return tuple({"s0": row[0], "s1": row[1]} for row in rows)
    s0 = 0 if zero else builder.pick((2, 3, 1, 5))
    return ({"s0": s0, "s1": 4},) * CALLS


def _shapes(builder: Builder, pattern: Pattern, *, leading: int) -> dict[str, tuple[Dim, ...]]:
    """A symbolic shape for each argument: one draw for each class of dimensions, ``leading`` dims for the leading one."""
    batch = ("s0", "s1")[:leading]
    drawn: dict[int, tuple[Dim, ...]] = {}
    large = is_large(pattern)
    for argument in pattern.arguments:
        for size in argument.dims:
            if size == pattern.leading:
                drawn[size] = batch
            elif size not in drawn:
                # What holds for a rule's example sizes (multiples of 128, say) holds for multiples of them; small ones
                # would equal the symbols' values by accident, and where some are large, more would cost time.
                free = [size * times for times in _MULTIPLES if size * times > max(_ROWS)]
                free = [number for number in free if (number,) not in drawn.values()]
                drawn[size] = (min(free) if large else builder.pick(free),)
    return {a.name: tuple(dim for size in a.dims for dim in drawn[size]) for a in pattern.arguments}


def is_large(pattern: Pattern) -> bool:
    """Whether the pattern's operands are so large that everything around them costs much time."""
    return any(size >= _LARGE for argument in pattern.arguments for size in argument.dims)


def drawn_specs(builder: Builder, pattern: Pattern, dtype: torch.dtype, kind: str | None) -> dict[str, Spec]:
    """A shape and a dtype for each argument of the pattern."""
    if kind == "size":
        refused = builder.pick(operands_of(pattern.name).refused_sizes)
        shapes = {a.name: tuple(refused.get(size, max(size, 1)) for size in a.dims) for a in pattern.arguments}
    else:
        leading = (2,) if kind == "dropped keyword" else (1, 1, 2)
        shapes = _shapes(builder, pattern, leading=builder.pick(leading) if pattern.rows else 1)
    # Only what a rule's examples have in 16 bits is of the drawn dtype; float32 scales and integers stay what they are,
    # unless the rule says that they depend on it.
    depending = operands_of(pattern.name).dependent.get(dtype, {})
    own = {a.name: dtype if a.dtype in SIXTEEN_BITS else a.dtype for a in pattern.arguments}
    return {name: (shapes[name], depending.get(name, kind)) for name, kind in own.items()}
