"""Programs that write a value through a view of it which AOT undoes by arithmetic, by a copy, or by another view.

The value is a copy of the first argument, so that no argument changes. Its elements are integers; `expand` shows them as floats,
of which many are NaN, because a sum and a difference of integers are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from npugraph_ex.testing.generator.choices import Choices
from npugraph_ex.testing.generator.inputs import Dim
from npugraph_ex.testing.generator.program import Program, Ref, Step

_OWN, _VIEW, _READ = "own", "view", "read_through"
_WRITES: tuple[tuple[str, tuple[object, ...]], ...] = (
    ("aten.add_.Tensor", (1,)), ("aten.zero_.default", ()), ("aten.cumsum_.default", (0,)),
)  # fmt: skip
_OF_FLOATS: tuple[tuple[str, tuple[object, ...]], ...] = (("aten.zero_.default", ()), ("aten.fill_.Scalar", (3.0,)))
_Maker = Callable[[Choices, Sequence[Dim]], tuple[Step, ...]]


def _expanded(_: Choices, shape: Sequence[Dim]) -> tuple[Step, ...]:
    floats = Step("aten.view.dtype", (Ref(_OWN), torch.float32), results=("floats",))
    return floats, Step("aten.expand.default", (Ref("floats"), (1, *(-1 for _ in shape))), results=(_VIEW,))


def _unfolded(choices: Choices, shape: Sequence[Dim]) -> tuple[Step, ...]:
    size = choices.number(1, int(shape[-1]))
    windows = (len(shape) - 1, size, choices.number(size, int(shape[-1])))
    return (Step("aten.unfold.default", (Ref(_OWN), *windows), results=(_VIEW,)),)


def _kept(_: Choices, shape: Sequence[Dim]) -> tuple[Step, ...]:
    del shape
    return (Step("aten.dropout.default", (Ref(_OWN), 0.5, False), results=(_VIEW,)),)


def _turned(_: Choices, shape: Sequence[Dim]) -> tuple[Step, ...]:
    split = Step("aten.view.default", (Ref(_OWN), (-1, 2, int(shape[-1]) // 2)), results=("split",))
    return split, Step("aten.transpose.int", (Ref("split"), 0, 1), results=(_VIEW,))


_MAKERS: tuple[_Maker, ...] = (_expanded, _unfolded, _kept, _turned)


def with_a_written_view(choices: Choices, program: Program) -> Program:
    """The program, which in the end reads a copy of its first argument, written through a view; or as it is."""
    shape = program.inputs[0].shape
    if (program.functional and program.dynamic) or not isinstance(shape[-1], int) or shape[-1] % 2:
        return program
    make = choices.pick(_MAKERS)
    copied = Step("aten.clone.default", (Ref("x0"),), (("memory_format", torch.contiguous_format),), (_OWN,))
    operator, arguments = choices.pick(_OF_FLOATS if make is _expanded else _WRITES)
    write = Step(operator, (Ref(_VIEW), *arguments))
    read = Step("aten.bitwise_not.default", (Ref(_OWN),), results=(_READ,))
    steps = (*program.steps, copied, *make(choices, shape), write, read)
    return replace(program, steps=steps, outputs=(*program.outputs, _READ, _OWN), functional=False)
