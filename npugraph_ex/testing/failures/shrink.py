"""Shrinks a failing program: drops steps, replaces their operands by inputs, and simplifies them, as long as the program fails.

It works on the program itself, not on the random choices behind it. So it serves every source of programs, and each try is
one check. The order is fixed: the same failure always gives the same program.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from npugraph_ex.operators import on_host
from npugraph_ex.testing.arguments import check_least, checked
from npugraph_ex.testing.generator.inputs import Input, make_inputs
from npugraph_ex.testing.generator.program import Program, Ref, Step
from npugraph_ex.testing.oracle.host import callable_of

Fails = Callable[[Program], bool]
TRIES = 600
"""How many programs are tried at most: a number and no time, so that a busy machine finds the same."""


@checked
def shrink(program: Program, fails: Fails, *, tries: int = TRIES) -> Program:
    """The smallest program found that still fails.

    Args:
        program: one that fails.
        fails: whether a program fails, and in the same way.
        tries: how many smaller programs to try at most.

    Raises:
        ValueError: the program does not fail, or tries is below zero.
    """
    check_least("tries", tries, 0)
    if not fails(program):
        raise ValueError("shrink takes a program that fails; this one does not.")
    best, progress, left = program, True, tries
    while progress:
        progress = False
        for candidate in _smaller(best):
            if not _is_legal(candidate):
                continue
            if left == 0:
                return best
            left -= 1
            if fails(candidate):
                best, progress = candidate, True
                break
    return best


def _smaller(program: Program) -> Iterator[Program]:
    """Programs a little smaller, the largest cuts first."""
    if program.dynamic or len({tuple(size.items()) for size in program.sizes}) > 1:
        static = dataclasses.replace(program, dynamic=False, sizes=(program.sizes[0],) * len(program.sizes))
        yield static
    if any(map(_orders, program.steps)):
        # Scopes and events go together: without one of them the others may mean nothing.
        yield _tidy(program, steps=tuple(step for step in program.steps if not _orders(step)))
    kept = _essential(program)
    for position in range(len(program.outputs)):
        if len(program.outputs) > 1 and not kept:
            yield _tidy(program, outputs=(*program.outputs[:position], *program.outputs[position + 1 :]))
    for position in reversed(range(len(program.steps))):
        if not program.steps[position].results and position not in kept:
            yield _tidy(program, steps=_without(program.steps, position))
    results = _results(program)
    for position in reversed(range(len(program.steps))):
        if position not in kept:
            yield from _cut(program, position, results)
    yield from _plainer(program)


def _plainer(program: Program) -> Iterator[Program]:
    """The program with one input made dense and of usual magnitude."""
    for position, spec in enumerate(program.inputs):
        plain = Input(spec.shape, spec.dtype, alias_of=spec.alias_of, below=spec.below, least=spec.least)
        if spec not in (plain, dataclasses.replace(plain, seed=spec.seed)) and spec.alias_of is None:
            inputs = list(program.inputs)
            inputs[position] = dataclasses.replace(plain, seed=spec.seed)
            yield dataclasses.replace(program, inputs=tuple(inputs))


def _orders(step: Step) -> bool:
    """Whether a step belongs to a stream: a scope, a record, a wait."""
    return step.operator.startswith("npugraph_ex.")


def _essential(program: Program) -> range:
    """The steps that must stay while fusions are counted: the planted ones and, in a near-miss, those that spoil them."""
    planted = [i for i, step in enumerate(program.steps) if any(name.startswith("p") for name in step.results)]
    counted = program.near_miss is not None or program.expected is not None
    return range(planted[0], planted[-1] + 1) if counted and planted else range(0)


def _is_legal(program: Program) -> bool:
    """Whether the program shows anything: it runs in eager mode, and asks for nothing that torch leaves open."""
    wanted, results = {name for step in program.steps for name in step.results}, _results(program)
    return not program.runs or (wanted <= results.keys() and not _views_an_input_undeclared(program, results))


def _views_an_input_undeclared(program: Program, results: dict[str, torch.Tensor]) -> bool:
    """Whether an `_unsafe_view` or the like, which torch makes of fresh memory only, lies in an input."""
    views = {name for step in program.steps if "unsafe" in step.operator for name in step.results}
    there = {results[name].untyped_storage().data_ptr() for name in views}
    inputs = {results[f"x{position}"].untyped_storage().data_ptr() for position in range(len(program.inputs))}
    return not there.isdisjoint(inputs - {0})


def _without(steps: Sequence[Step], position: int) -> tuple[Step, ...]:
    return (*steps[:position], *steps[position + 1 :])


def _cut(program: Program, position: int, results: dict[str, torch.Tensor]) -> Iterator[Program]:
    """The program with new inputs in place of what one step computes, or with that step's own operand."""
    step = program.steps[position]
    if not step.results or _orders(step) or any(name not in results for name in step.results):
        return
    if any(results[name].is_complex() for name in step.results):
        return  # no input is
    operands = [value for value in step.args if isinstance(value, Ref)]
    for operand in operands if len(step.results) == 1 else ():
        source, value = results.get(operand.name), results[step.results[0]]
        if source is not None and source.shape == value.shape and source.dtype == value.dtype:
            renamed = {step.results[0]: operand.name}
            yield _tidy(_renamed(dataclasses.replace(program, steps=_without(program.steps, position)), renamed))
    new, inputs = dict[str, str](), list(program.inputs)
    for name in step.results:
        new[name] = f"x{len(inputs)}"
        value = results[name]
        inputs.append(Input(tuple(value.shape), str(value.dtype).removeprefix("torch."), seed=len(inputs)))
    shorter = dataclasses.replace(program, inputs=tuple(inputs), steps=_without(program.steps, position))
    yield _tidy(_renamed(shorter, new))


def _renamed(program: Program, names: dict[str, str]) -> Program:
    def fresh(value: Any) -> Any:
        if isinstance(value, Ref):
            return Ref(names.get(value.name, value.name))
        return tuple(map(fresh, value)) if isinstance(value, tuple) else value

    steps = tuple(
        dataclasses.replace(
            step,
            args=tuple(map(fresh, step.args)),
            kwargs=tuple((name, fresh(value)) for name, value in step.kwargs),
            results=tuple(names.get(name, name) for name in step.results),
        )
        for step in program.steps
    )
    outputs = tuple(dict.fromkeys(names.get(name, name) for name in program.outputs))
    return dataclasses.replace(program, steps=steps, outputs=outputs)


def _tidy(
    program: Program, *, steps: tuple[Step, ...] | None = None, outputs: tuple[str, ...] | None = None
) -> Program:
    """The program without steps that nobody needs, and without inputs that nobody reads."""
    needed = set(program.outputs if outputs is None else outputs)
    kept: list[Step] = []
    for step in reversed(program.steps if steps is None else steps):
        if not step.results or needed & set(step.results):
            kept.append(step)
            needed |= _read(step)
    used = [
        position
        for position in range(len(program.inputs))
        if f"x{position}" in needed or any(spec.alias_of == position for spec in program.inputs)
    ]
    places = {old: new for new, old in enumerate(used)}
    inputs = tuple(
        dataclasses.replace(spec, alias_of=None if spec.alias_of is None else places[spec.alias_of])
        for spec in (program.inputs[position] for position in used)
    )
    tidied = dataclasses.replace(
        program, inputs=inputs, steps=tuple(reversed(kept)), outputs=program.outputs if outputs is None else outputs
    )
    return _renamed(tidied, {f"x{old}": f"x{new}" for old, new in places.items()})


def _read(step: Step) -> set[str]:
    found: set[str] = set()

    def look(value: Any) -> None:
        if isinstance(value, Ref):
            found.add(value.name)
        elif isinstance(value, tuple):
            for item in value:
                look(item)

    look((*step.args, *dict(step.kwargs).values()))
    return found


def _results(program: Program) -> dict[str, torch.Tensor]:
    """What each step computes in the first call, on the CPU; nothing where the program cannot run there."""
    values: dict[str, Any] = {
        f"x{position}": tensor
        for position, tensor in enumerate(make_inputs(program.inputs, sizes=program.sizes[0], device="cpu"))
    }

    def given(value: Any) -> Any:
        if isinstance(value, Ref):
            return values[value.name]
        return [given(item) for item in value] if isinstance(value, tuple) else on_host(value)

    for step in program.steps:
        function: Any = torch.ops
        for part in step.operator.split("."):
            function = getattr(function, part)
        try:
            result = callable_of(function)(*map(given, step.args), **{n: given(v) for n, v in step.kwargs})
        except Exception:  # noqa: BLE001 - a program that was cut may be wrong in any way
            return {}
        found = result if isinstance(result, (tuple, list)) else (result,)
        values.update(zip(step.results, found, strict=False))
    return values
