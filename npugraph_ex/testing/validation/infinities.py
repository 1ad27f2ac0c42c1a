"""Programs in which the pattern meets an infinity or a NaN, although their inputs are finite."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from npugraph_ex.aclgraph import scopes
from npugraph_ex.testing.generator.inputs import make_inputs
from npugraph_ex.testing.generator.planted import refs
from npugraph_ex.testing.generator.program import Program
from npugraph_ex.testing.oracle.case import Case, Outcome
from npugraph_ex.testing.oracle.checking import check


def wrong_by_infinities(program: Program, case: Case, checked: Callable[[Case], Outcome] = check) -> bool:
    """Whether a wrong program would be right if nothing were asked of what overflowed, and the pattern meets an overflow."""
    lenient = dataclasses.replace(case, limits=dataclasses.replace(case.limits, overflow=True))
    return meets_infinities(program) and checked(lenient).ok


def meets_infinities(program: Program) -> bool:
    """Whether the pattern reads or makes an infinity or a NaN in some call: a product before it overflows, or it does itself."""
    steps = program.steps
    planted = [place for place, step in enumerate(steps) if any(name.startswith("p") for name in step.results)]
    if not planted:
        return False
    before = steps[: planted[0]]
    known = {*(f"x{place}" for place in range(len(program.inputs))), *(name for one in before for name in one.results)}
    read = [ref.name for place in planted for ref in refs(steps[place]) if ref.name in known]
    seen = dict.fromkeys([*read, *(name for place in planted for name in steps[place].results)])
    start = scopes.closing(dataclasses.replace(program, steps=steps[: planted[-1] + 1], outputs=tuple(seen)).function())
    return any(
        not torch.isfinite(value).all()
        for call, sizes in enumerate(program.sizes)
        for value in start(*make_inputs(program.inputs, sizes=sizes, call=call))
        if isinstance(value, torch.Tensor)
    )
