"""One example about native streams that write parts of buffers: a Python program, drawn as data and compiled as a user would.

Each part of a buffer belongs to one stream for as long as a phase lasts, and the streams meet between phases. So the program
has no race, whatever it writes: compiled, it gives the integers of eager mode on every schedule, and nobody is warned.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import npu_emulator
from npugraph_ex.errors import StreamOrderWarning

PARTS: Sequence[Callable[[torch.Tensor, int], torch.Tensor]] = (
    lambda buffer, part: buffer[2 * part : 2 * part + 2],
    lambda buffer, part: buffer.narrow(0, 2 * part, 2),
    lambda buffer, part: buffer[:, part::4],
    lambda buffer, part: buffer.t()[2 * part : 2 * part + 2],
    lambda buffer, part: buffer.view(4, 2, 8).select(0, part),
    lambda buffer, part: buffer.view(-1)[16 * part : 16 * part + 16],
    lambda buffer, part: buffer.unsqueeze(0)[:, 2 * part : 2 * part + 2],
    lambda buffer, part: buffer.chunk(4)[part],
)
"""Ways of cutting an 8x8 buffer into four parts without a byte in common."""

# Each takes what all take.
# ruff: noqa: ARG005
WRITES: Sequence[Callable[[torch.Tensor, torch.Tensor, int], object]] = (
    lambda part, source, number: part.copy_(source * number),
    lambda part, source, number: part.add_(source),
    lambda part, source, number: part.mul_(number),
    lambda part, source, number: part.__setitem__(..., source - number),
    lambda part, source, number: part.fill_(number),
    lambda part, source, number: part.add_(part * number),
)

OPTIONS: Sequence[Mapping[str, Any]] = (
    {},
    {"inplace_pass": False},
    {"input_inplace_pass": False},
    {"remove_noop_ops": False},
    {"force_eager": True},
    {"clone_output": True},
)

SCHEDULES = ("lazy", "random:1", "pct:1:3")


@dataclass(frozen=True)
class NativeStep:
    """One write: ``WRITES[write]`` with ``number``, to one part of the phase's cut, on the main stream (0) or a side stream."""

    part: int
    stream: int
    write: int
    number: int


@dataclass(frozen=True)
class Phase:
    """Writes between a fork and a join of both side streams; ``cut`` chooses from ``PARTS``."""

    cut: int
    steps: tuple[NativeStep, ...]


@dataclass(frozen=True)
class NativeProgram:
    """A program of an input ``x`` and a buffer, which is an input too or made by the program."""

    phases: tuple[Phase, ...]
    buffer_is_given: bool
    returns_a_view: bool

    def run(self, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        """Run; the streams are native ones."""
        main, sides = torch.npu.current_stream(), (torch.npu.Stream(), torch.npu.Stream())
        buffer = given if self.buffer_is_given else torch.zeros_like(x)
        for phase in self.phases:
            for side in sides:
                side.wait_stream(main)
            for step in phase.steps:
                with torch.npu.stream((main, *sides)[step.stream]):
                    cut = PARTS[phase.cut]
                    WRITES[step.write](cut(buffer, step.part), cut(x, step.part), step.number)
            for side in sides:
                main.wait_stream(side)
        return buffer[1:] if self.returns_a_view else buffer + 1


def draw(seed: int) -> NativeProgram:
    """The program that ``seed`` stands for."""
    choose = random.Random(seed)
    phases = []
    for _ in range(choose.randint(1, 3)):
        owners = [choose.randrange(3) for _ in range(4)]
        parts = [choose.randrange(4) for _ in range(choose.randint(2, 7))]
        steps = [NativeStep(part, owners[part], choose.randrange(len(WRITES)), choose.randint(1, 4)) for part in parts]
        phases.append(Phase(choose.randrange(len(PARTS)), tuple(steps)))
    return NativeProgram(tuple(phases), choose.random() < 0.5, choose.random() < 0.5)


def native_part_example(seed: int) -> str:
    """What is wrong with the example that ``seed`` stands for; empty when nothing is."""
    program, options = draw(seed), OPTIONS[seed % len(OPTIONS)]
    x = torch.arange(64, dtype=torch.int32).reshape(8, 8)
    given = torch.full_like(x, 7)

    def call(function: Callable[..., torch.Tensor]) -> list[list[list[int]]]:
        buffer = given.npu()
        return [function(x.npu(), buffer).cpu().tolist(), buffer.cpu().tolist()]

    expected = call(program.run)
    torch.compiler.reset()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled = torch.compile(program.run, backend="npugraph_ex", options=dict(options))
        for text in SCHEDULES:
            with npu_emulator.schedule(text):
                results = call(compiled)
            if results != expected:
                return f"under schedule {text} and {dict(options)}: {results} instead of {expected}\n{program}"
    blamed = [str(warning.message) for warning in caught if warning.category is StreamOrderWarning]
    return f"a program without a race was blamed: {blamed[0]}\n{program}" if blamed else ""
