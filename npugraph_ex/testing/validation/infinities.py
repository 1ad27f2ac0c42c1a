"""Programs in which the pattern meets an infinity or a NaN, although their inputs are finite."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from collections.abc import Set as AbstractSet

import torch
from torch.utils._pytree import tree_leaves

from npugraph_ex.aclgraph import scopes
from npugraph_ex.testing.generator.inputs import make_inputs
from npugraph_ex.testing.generator.planted import refs
from npugraph_ex.testing.generator.program import Program, Step
from npugraph_ex.testing.oracle.case import Case, Outcome
from npugraph_ex.testing.oracle.checking import check


def wrong_by_infinities(program: Program, case: Case, checked: Callable[[Case], Outcome] = check) -> bool:
    """Whether a wrong program would be right if nothing were asked of what overflowed, and the pattern meets an overflow.

    Of what makes integers of infinities nothing is asked, because torch does not say what they are.
    """
    lenient = dataclasses.replace(case, limits=dataclasses.replace(case.limits, overflow=True))
    return meets_infinities(program) and (checked(lenient).ok or meets_infinities(program, as_integers=True))


def meets_infinities(program: Program, *, as_integers: bool = False) -> bool:
    """Whether something overflows in some call: before the pattern, or in a step of it that is given finite numbers alone.

    An infinity that the pattern is written with, such as that of a mask, is no overflow, nor is the NaN that comes of it.
    With ``as_integers``: whether a step of the pattern makes integers of infinities or NaN.
    """
    steps = program.steps
    planted = [place for place, step in enumerate(steps) if any(name.startswith("p") for name in step.results)]
    if not planted:
        return False
    before = steps[: planted[0]]
    known = {*(f"x{place}" for place in range(len(program.inputs))), *(name for one in before for name in one.results)}
    read = [ref.name for place in planted for ref in refs(steps[place]) if ref.name in known]
    seen = dict.fromkeys([*read, *(name for place in planted for name in steps[place].results)])
    start = scopes.closing(dataclasses.replace(program, steps=steps[: planted[-1] + 1], outputs=tuple(seen)).function())
    for call, sizes in enumerate(program.sizes):
        values = start(*make_inputs(program.inputs, sizes=sizes, call=call))
        infinite = {name for name, value in zip(seen, values, strict=True) if not _is_finite(value)}
        if as_integers:
            met = any(_makes_integers(steps[place], infinite) for place in planted)
        else:
            met = bool(infinite.intersection(read)) or any(_overflows(steps[place], infinite) for place in planted)
        if met:
            return True
    return False


def _overflows(step: Step, infinite: AbstractSet[str]) -> bool:
    given = (
        *(ref.name in infinite for ref in refs(step)),
        *(not _is_finite(one) for one in tree_leaves([step.args, step.kwargs])),
    )
    return not any(given) and not infinite.isdisjoint(step.results)


def _makes_integers(step: Step, infinite: AbstractSet[str]) -> bool:
    dtype = dict(step.kwargs).get("dtype")
    integers = isinstance(dtype, torch.dtype) and not dtype.is_floating_point and dtype != torch.bool
    return integers and any(ref.name in infinite for ref in refs(step))


def _is_finite(value: object) -> bool:
    """Whether a tensor or a number has neither infinities nor NaN; what is neither has none."""
    if isinstance(value, torch.Tensor):
        return bool(torch.isfinite(value).all())
    return not isinstance(value, float) or math.isfinite(value)
