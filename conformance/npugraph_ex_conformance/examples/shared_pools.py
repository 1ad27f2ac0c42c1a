"""Examples about captured graphs that share a memory pool: no replay overwrites what another graph handed out.

Random integer programs are compiled into one pool and called in random order, in sizes old and new, while results of earlier
calls are held; some are dropped, so that captured graphs are replayed too. After every call all held results are what eager
mode gave.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import npugraph_ex
from npugraph_ex.testing.generator.builder import Builder
from npugraph_ex.testing.generator.choices import Choices, Sampled
from npugraph_ex.testing.generator.inputs import Dim, make_inputs
from npugraph_ex.testing.generator.program import Program
from npugraph_ex.testing.oracle import tracing
from npugraph_ex.testing.oracle.judge import same_values
from npugraph_ex.testing.oracle.observation import Observation, host_copy, observe, visible_difference

_CALLS = 12
_MOST_PROGRAMS = 3
_MOST_STEPS = 6
_BRANCH, _ALSO_RETURNED, _DYNAMIC, _ONE_STREAM, _DROPPED = 20, 15, 60, 50, 40
"""Chances in percent: that a step adds another value; that a value is returned too; of symbolic shapes; that all programs are
captured on one stream; that a held result is dropped after a call."""
_SHAPES: tuple[tuple[Dim, ...], ...] = (("s0", 8), ("s0",), ("s0", "s1"))
_ROWS = (3, 5, 40, 64)
_OPERATORS: tuple[tuple[Any, ...], ...] = (
    ("roll.default", (1,), (0,)), ("flip.default", (0,)), ("neg.default",), ("bitwise_not.default",),
)  # fmt: skip
"""The first two never work in place, so that memory is freed before the last result has its own."""
_MORE_THAN_POOLED = 64
"""More draws than torch_npu has streams in its pool."""


@dataclass(frozen=True)
class _Compiled:
    """A program, as traced and as compiled into the pool."""

    program: Program
    eager: Callable[..., Any]
    captured: Callable[..., Any]

    @classmethod
    def into(cls, pool: tuple[int, int], program: Program) -> _Compiled:
        function = program.function()
        traced = tracing.trace(
            function, program.inputs, program.sizes[0], dynamic=program.dynamic, functional=program.functional
        )
        compiled = npugraph_ex.compile_fx(tracing.copy_of(traced), None, {"use_graph_pool": pool})
        return cls(program, traced if program.functional else function, compiled)


@dataclass(frozen=True)
class _KeptResults:
    """The results of one call, and copies of what they must stay."""

    call: int
    results: Sequence[Any]
    wanted: Sequence[Any]

    def is_as_it_was(self) -> bool:
        return all(same_values(old, host_copy(new)) for old, new in zip(self.wanted, self.results, strict=True))


def shared_pool_example(seed: int) -> str:
    """What is wrong with one example; empty when nothing is."""
    choices = Choices(Sampled(f"shared pool {seed}"))
    try:
        pool = torch.npu.graph_pool_handle()
        count = choices.number(2, _MOST_PROGRAMS)
        return _called(choices, [_Compiled.into(pool, _program(Builder(choices))) for _ in range(count)])
    except Exception as error:  # noqa: BLE001 - whatever a fault makes the library raise is what was found
        return f"raised {type(error).__name__}: {error}"


def _program(builder: Builder) -> Program:
    """A chain, which gives memory back before it has its result, with branches; returns the last value and perhaps others."""
    choices, shape = builder.choices, builder.pick(_SHAPES)
    last = builder.new_input(shape, torch.int32, plain=True)
    for _ in range(choices.number(1, _MOST_STEPS)):
        if builder.chance(_BRANCH):
            operator: tuple[Any, ...] = ("add.Tensor", builder.pick(list(builder.values)))
        else:
            operator = builder.pick(_OPERATORS)
        last = builder.emit(f"aten.{operator[0]}", last, *operator[1:], shape=shape, dtype=torch.int32)
    made = [name for name in builder.values if name.startswith("v") and name != last]
    dynamic = builder.chance(_DYNAMIC)
    rows = [choices.order(_ROWS) for _ in range(2 if dynamic else 1)]
    return Program(
        inputs=tuple(builder.inputs),
        steps=tuple(builder.steps),
        outputs=(last, *(name for name in made if builder.chance(_ALSO_RETURNED))),
        sizes=tuple({"s0": first, "s1": second} for first, second, *_ in rows),
        dynamic=dynamic,
        dtype="int32",
        expected=0,
    )


def _called(choices: Choices, compiled: Sequence[_Compiled]) -> str:
    held: list[_KeptResults] = []
    met: list[_Compiled] = []
    home = torch.npu.Stream() if choices.chance(_ONE_STREAM) else None
    for call in range(_CALLS):
        one = choices.pick(compiled)
        if home is not None and one not in met:
            _draw_until(home)
            met.append(one)
        sizes = choices.pick(one.program.sizes)
        expected, _ = _observed(one.eager, one.program, sizes, call)
        actual, results = _observed(one.captured, one.program, sizes, call)
        wrong = visible_difference(expected, actual)
        values = zip((*expected.outputs, *expected.inputs), (*actual.outputs, *actual.inputs), strict=not wrong)
        if wrong or not all(same_values(old, new) for old, new in values):
            return f"replay, call {call}: {wrong or 'other values than eager mode'}"
        held.append(_KeptResults(call, results, expected.outputs))
        changed = next((one.call for one in held if not one.is_as_it_was()), None)
        if changed is not None:
            return f"replay, call {call} changed a held result of call {changed}"
        held = [one for one in held if not choices.chance(_DROPPED)]
    return ""


def _draw_until(home: torch.npu.Stream) -> None:
    """Let the next capture have the stream after ``home``, as if torch_npu's pool had come round among many compiled functions.

    Memory that was freed on one stream is given out on that stream only.
    """
    for _ in range(_MORE_THAN_POOLED):
        if torch.npu.Stream() == home:
            return


def _observed(
    function: Callable[..., Any], program: Program, sizes: dict[str, int], call: int
) -> tuple[Observation, Sequence[Any]]:
    """One call, on inputs of its own, as it is seen right after; and its results, alive."""
    inputs = make_inputs(program.inputs, sizes=sizes, call=call)
    results = function(*inputs)
    results = tuple(results) if isinstance(results, (tuple, list)) else (results,)
    return observe(inputs, results), results
