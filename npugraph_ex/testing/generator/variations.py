"""What is changed in a program that is drawn: where its arguments lie, sizes that are equal, what is written, what is returned.

The program stays legal, and whatever it has a pattern for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from npugraph_ex.testing.generator.builder import Value
from npugraph_ex.testing.generator.choices import Choices
from npugraph_ex.testing.generator.inputs import Dim, Input, Layout
from npugraph_ex.testing.generator.program import Program, Ref, Step

_OTHERWISE: Mapping[Layout, Layout] = {"strided": "expanded", "transposed": "expanded", "offset": "inside"}
"""The layout that may take another one's place; dense ones are replaced by dense ones."""
_CONSTANT = 4
"""A size that many shapes have as a number."""


def moved(choices: Choices, program: Program, values: Mapping[str, Value]) -> Program:
    """Some arguments lie elsewhere: they end before their storage does, or all their rows are one.

    Args:
        choices: what decides.
        program: as drawn.
        values: all values that the program may write, by name.
    """
    written = {values[name].memory_of for name in written_names(program) if name in values}
    written |= set(written_names(program)) - values.keys()
    twins = {spec.alias_of for spec in program.inputs}

    def elsewhere(position: int, spec: Input) -> Input:
        alone = spec.alias_of is None and position not in twins
        layout = _OTHERWISE.get(spec.layout) if alone and choices.chance(50) else None
        if layout is None or (layout == "expanded" and (spec.distinct or f"x{position}" in written)):
            return spec
        return replace(spec, layout=layout)

    return replace(program, inputs=tuple(elsewhere(*item) for item in enumerate(program.inputs)))


def written_names(program: Program) -> Iterator[str]:
    """The names of what is written in place."""
    for step in program.steps:
        if not step.results and step.args and isinstance(step.args[0], Ref):
            yield step.args[0].name


def with_equal_sizes(choices: Choices, program: Program) -> Program:
    """Two sizes with names of their own are equal: to each other, or to a number; in some calls or in all."""
    which = choices.pick(({"s0", "s1"}, {"s0", "s1"}, {"s0"}, {"s1"}))
    calls = choices.pick((program.sizes, program.sizes[1:2], program.sizes[:1]))

    def equal(sizes: Mapping[str, int]) -> dict[str, int]:
        size = _CONSTANT if len(which) == 1 else sizes["s0"]
        return {name: size if name in which else number for name, number in sizes.items()}

    return replace(program, sizes=tuple(equal(sizes) if sizes in calls else dict(sizes) for sizes in program.sizes))


def with_own_values(choices: Choices, program: Program) -> Program:
    """An argument gets the value that it has: from itself, or from a copy."""
    places = [place for place, spec in enumerate(program.inputs) if not spec.is_expanded and spec.below is None]
    if not places:
        return program
    name, before = f"x{choices.pick(places)}", choices.number(0, len(program.steps))
    own: tuple[Step, ...] = (Step("aten.copy_.default", (Ref(name), Ref(name))),)
    if choices.chance(50):
        copy = Step("aten.clone.default", (Ref(name),), results=("own",))
        own = (copy, Step("aten.copy_.default", (Ref(name), Ref("own"))))
    return replace(program, steps=(*program.steps[:before], *own, *program.steps[before:]))


def with_returned_views(choices: Choices, program: Program, values: Mapping[str, Value]) -> Program:
    """A result's view is a result, too: all of it, a part, or a part of a part."""
    named = [name for name in program.outputs if name in values]
    if not named:
        return program
    name = choices.pick(named)
    shape, steps = values[name].shape, list[Step]()
    for position in range(choices.number(1, 2)):
        view = choices.pick(tuple(_views(shape)))
        steps.append(Step(view[0], (Ref(name), *view[1]), results=(f"w{position}",)))
        name, shape = f"w{position}", view[2]
    shown = tuple(choices.order([*program.outputs, name])) if choices.chance(50) else (*program.outputs, name)
    return replace(program, steps=(*program.steps, *steps), outputs=shown)


def _views(shape: tuple[Dim, ...]) -> Iterator[tuple[str, tuple[int, ...], tuple[Dim, ...]]]:
    """Operator, arguments and shape of the views of a shape."""
    yield "aten.alias.default", (), shape
    yield "aten.unsqueeze.default", (0,), (1, *shape)
    if len(shape) > 1:
        yield "aten.transpose.int", (0, 1), (shape[1], shape[0], *shape[2:])
    for dim, size in enumerate(shape):
        if isinstance(size, int) and size > 1:
            rest = (*shape[:dim], size - 1, *shape[dim + 1 :])
            yield "aten.slice.Tensor", (dim, 0, size - 1), rest
            yield "aten.slice.Tensor", (dim, 1, size), rest
            yield "aten.select.int", (dim, size - 1), (*shape[:dim], *shape[dim + 1 :])
