"""Random int32 programs of xor, add, views and in-place writes, without a pattern."""

from __future__ import annotations

import torch

from npugraph_ex.testing.generator.builder import Builder
from npugraph_ex.testing.generator.choices import Choices
from npugraph_ex.testing.generator.inputs import Dim
from npugraph_ex.testing.generator.program import Program
from npugraph_ex.testing.generator.returned import returned_values
from npugraph_ex.testing.generator.shapes import sizes_of_calls
from npugraph_ex.testing.generator.undeclared_views import view_a_copy
from npugraph_ex.testing.generator.variations import moved, with_equal_sizes, with_own_values, with_returned_views
from npugraph_ex.testing.generator.written_parts import write_parts


def integer_program(choices: Choices, *, dynamic: bool | None) -> Program:
    """One program; ``dynamic`` as for `integer_programs`."""
    builder = Builder(choices)
    is_dynamic = builder.chance(30) if dynamic is None else dynamic
    shape: tuple[Dim, ...] = builder.pick((("s0", 8), ("s0",), (4, 4), ("s0", "s1", 4), (4, 4), (8,)))
    for _ in range(choices.number(1, 4)):
        builder.new_input(shape, torch.int32)
    _go_on(builder, choices.number(1, 14))
    made = [name for name in builder.values if name.startswith("v")]
    if not made:
        made = [builder.emit("aten.add.Tensor", "x0", 1, shape=shape, dtype=torch.int32)]
    outputs = returned_values(builder, made[-1:])
    sizes = sizes_of_calls(builder, dynamic=is_dynamic, zero=not is_dynamic and builder.chance(8))
    functional = builder.chance(60)
    for further in (view_a_copy, write_parts):
        if not builder.chance(25):
            continue
        further(builder)
        _go_on(builder, choices.number(0, 4))
        outputs = returned_values(builder, [*outputs, [name for name in builder.values if name.startswith("v")][-1]])
    program = Program(
        inputs=tuple(builder.inputs),
        steps=tuple(builder.steps),
        outputs=outputs,
        sizes=sizes,
        dynamic=is_dynamic,
        functional=functional,
        dtype="int32",
        expected=0,
    )
    return _varied(builder, program)


def _varied(builder: Builder, program: Program) -> Program:
    """The program with some of the `variations`; drawn last, so that they are the first to go when it shrinks."""
    choices, values = builder.choices, builder.values
    if builder.chance(25):
        program = with_own_values(choices, program)
    if builder.chance(25):
        program = with_returned_views(choices, program, values)
    if program.dynamic and builder.chance(60):
        program = with_equal_sizes(choices, program)
    return moved(choices, program, values)


def _go_on(builder: Builder, steps: int) -> None:
    """More steps on integers, some of them writes."""
    for _ in range(steps):
        if builder.chance(30):
            builder.mutate(builder.mutable() if builder.chance(50) else builder.latest())
        else:
            builder.consume()
