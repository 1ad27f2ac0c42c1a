"""Numeric arguments that fill places, as that of `masked_fill`, or bound values: there a program often writes an infinity."""

from __future__ import annotations

import math

import torch

from npugraph_ex.testing.generator.patterns import Pattern, schema_of

_FILLS = frozenset({
    ("masked_fill", "value"), ("where", "other"), ("where", "self"), ("full", "fill_value"), ("full_like", "fill_value"),
    ("new_full", "fill_value"), ("fill", "value"), ("constant_pad_nd", "value"), ("scalar_tensor", "s"),
    ("clamp", "min"), ("clamp", "max"), ("clamp_min", "min"), ("clamp_max", "max"),
})  # fmt: skip
"""Operators and their arguments that are copied into places, or compared with values, and never computed with."""


def infinities_for(pattern: Pattern, name: str) -> tuple[float, ...]:
    """The infinities that a numeric argument of a pattern may be, as the number with which a mask fills; else nothing.

    What is read off two traces, of the given number and of an infinity, is where the number goes.
    """
    given = pattern.rule.scalars[name]
    if not isinstance(given, float):
        return ()
    shapes = {one.name: one.dims for one in pattern.arguments}
    dtypes = {one.name: one.dtype for one in pattern.arguments}
    try:
        usual, other = (
            pattern.trace(shapes, dtypes, {**pattern.rule.scalars, name: number}).steps for number in (given, -math.inf)
        )
    except Exception:  # noqa: BLE001 - a user's function raises what it likes about numbers
        return ()
    if [step.operator for step in usual] != [step.operator for step in other]:
        return ()
    read = [
        (schema.name.split("::")[1], argument.name)
        for one, changed in zip(usual, other, strict=True)
        for schema in [schema_of(one)]
        for place, argument in enumerate(schema.arguments)
        if _given(one.args, dict(one.kwargs), place, argument)
        != _given(changed.args, dict(changed.kwargs), place, argument)
    ]
    return (-math.inf, math.inf) if read and _FILLS.issuperset(read) else ()


def _given(args: tuple[object, ...], kwargs: dict[str, object], place: int, argument: torch.Argument) -> object:
    return args[place] if place < len(args) else kwargs.get(argument.name)
