"""Inputs of unusual values: few distinct ones, rows of one, growing ones, and numbers so large that what is computed overflows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch

from npugraph_ex.operators import FORMATS
from npugraph_ex.testing.generator.choices import Choices
from npugraph_ex.testing.generator.inputs import Input
from npugraph_ex.testing.generator.program import Program

_WHOLE = 2
_LARGEST = FORMATS[torch.float16].largest
_BOTH_SIGNS = (1, -1)


def few_values(program: Program) -> Program:
    """The program with inputs of whole numbers from -2 to 2: some are equal, some zero, and several zero in one place.

    Masks have rows that are all true or all false.
    """
    return _with(program, lambda x: dataclasses.replace(x, whole=_WHOLE, around=()))


def flat_rows(program: Program) -> Program:
    """The program with inputs of which some rows are all zero, and some of one number."""
    return _with(program, lambda x: dataclasses.replace(x, flat=x.torch_dtype != torch.bool))


def growing_values(program: Program) -> Program:
    """The program with floating-point inputs whose values are larger towards the end of each dimension."""
    return _with(program, lambda x: dataclasses.replace(x, grows=x.torch_dtype.is_floating_point))


def corner_values(program: Program) -> Program:
    """The program with inputs of integers at which sums, doubles and products overflow."""
    changed = _with(program, lambda x: dataclasses.replace(x, corners=_is_integer(x.torch_dtype)))
    return dataclasses.replace(changed, overflow=True)


def large_values(program: Program, choices: Choices) -> Program:
    """The program with inputs whose squares or sums overflow in float16; of integers with `corner_values`.

    Wider dtypes have the same inputs: models have no larger ones. One tensor's have one sign, and often all tensors' the same: a
    sum of both signs may overflow in one order and not in another. Every fourth is small: its product with a mean of large ones is
    finite, and with a sum of them it may not be.
    """
    scale = choices.pick((math.sqrt(_LARGEST), _LARGEST / 4))
    common = choices.pick((1, -1, 0))

    def larger(x: Input) -> Input:
        if x.torch_dtype == torch.bool:
            return x
        if _is_integer(x.torch_dtype):
            limits = torch.iinfo(x.torch_dtype)
            return dataclasses.replace(x, around=(0, limits.min, limits.max), corners=True)
        return dataclasses.replace(x, scale=scale, sign=common or choices.pick(_BOTH_SIGNS), uneven=True)

    return dataclasses.replace(_with(program, larger), overflow=True)


def _is_integer(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and dtype != torch.bool


def _with(program: Program, change: Callable[[Input], Input]) -> Program:
    """The program with other values; integers of which an argument does not take any stay."""
    inputs: list[Input] = []
    for x in program.inputs:
        bounded = x.below is not None or x.least is not None or x.distinct
        changed = x if bounded else change(x)
        # Where one is another's memory, both are described alike.
        inputs.append(changed if x.alias_of is None else dataclasses.replace(inputs[x.alias_of], alias_of=x.alias_of))
    return dataclasses.replace(program, inputs=tuple(inputs))
