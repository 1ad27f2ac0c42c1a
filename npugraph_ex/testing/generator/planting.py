"""Appends a pattern to a program: makes its arguments, writes its steps, and draws when and where they run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from npugraph_ex.fusion.rules import operands_of
from npugraph_ex.testing.generator.builder import Builder
from npugraph_ex.testing.generator.inputs import Integers, size_of
from npugraph_ex.testing.generator.near_misses import example_trace, may_arrive_late
from npugraph_ex.testing.generator.numbers import numbers_for, numbers_that_run
from npugraph_ex.testing.generator.order_misses import arrives_late, on_a_stream
from npugraph_ex.testing.generator.patterns import ARGUMENT_STYLES, Pattern, respelt, with_style
from npugraph_ex.testing.generator.planted import Planted, renamed
from npugraph_ex.testing.generator.program import Ref, Step
from npugraph_ex.testing.generator.shapes import Spec
from npugraph_ex.testing.generator.sized_patterns import sized


def plant(  # noqa: PLR0913, PLR0917 - each is one thing that is drawn before
    builder: Builder,
    pattern: Pattern,
    near_miss: str | None,
    specs: Mapping[str, Spec],
    integers: Mapping[str, Integers],
    calls: Sequence[dict[str, int]],
    depth: int,
    numbers: Mapping[str, float],
) -> Planted:
    """Make arguments of the given shapes and dtypes for the pattern and append its steps.

    A numeric argument that ``numbers`` leaves out is drawn.
    """
    shapes, dtypes = {n: shape for n, (shape, _) in specs.items()}, {n: dtype for n, (_, dtype) in specs.items()}
    names = _arguments(builder, pattern, specs, integers, depth, varied=near_miss is None)
    if near_miss is None and builder.chance(25):
        builder.mutate(builder.mutable())
    certain = all(builder.values[name].contiguous for name in names.values())
    wanted = _wanted_numbers(builder, pattern, numbers, refused=near_miss == "number")
    here = {name: [size_of(dim, calls[0]) for dim in shape] for name, shape in shapes.items()}
    scalars = numbers_that_run(pattern.rule.scalars, wanted, partial(pattern.trace, here, dtypes))
    filled = sized(pattern, shapes, dtypes, scalars, calls[0])
    traced = filled.traced
    style = builder.pick(ARGUMENT_STYLES)
    prefix = f"p{len(builder.steps)}_"
    rename = {**names, **{name: prefix + name for name in traced.metas}}
    spelt = [respelt(step, traced) for step in traced.steps]
    if near_miss is not None or spelt == [*traced.steps] or builder.chance(50):
        spelt = [with_style(step, style) for step in traced.steps]
    steps = [renamed(step, rename) for step in spelt]
    return Planted(
        pattern=pattern,
        arguments=tuple(names.values()),
        steps=steps,
        outputs=[rename[name] for name in traced.outputs],
        vanishing=_spoilable(pattern, [rename[name] for name in traced.vanishing], steps),
        views={
            rename[view]: builder.values[names[base]].memory_of or names[base] for view, base in traced.views.items()
        },
        results={rename[name]: result for name, result in filled.results.items()},
        certain=certain,
        burnt_in=filled.burnt_in,
    )


def _arguments(
    builder: Builder,
    pattern: Pattern,
    specs: Mapping[str, Spec],
    integers: Mapping[str, Integers],
    depth: int,
    *,
    varied: bool,
) -> dict[str, str]:
    """The name of a value for each argument; ``varied``: some are not contiguous."""
    names = {
        a.name: builder.new_integers(*specs[a.name], integers[a.name])
        if a.name in integers
        else builder.produce(*specs[a.name], depth)
        for a in pattern.arguments
    }
    if operands_of(pattern.name).small_integers:
        names = {argument: _small(builder, name) for argument, name in names.items()}
    if not varied or not pattern.rows or builder.chance(80):
        # A fused operator may lay its results out differently for other inputs, and then must not be used. A search
        # function of more than rows may contain a view, which other layouts do not have.
        names = {argument: builder.contiguous(name) for argument, name in names.items()}
    return names


def _wanted_numbers(
    builder: Builder, pattern: Pattern, numbers: Mapping[str, float], *, refused: bool
) -> dict[str, float]:
    """A number for each numeric argument: from ``numbers``, or drawn, of those that the rule refuses if so asked."""
    return {
        name: numbers[name]
        if name in numbers
        else builder.pick(operands_of(pattern.name).refused_numbers if refused else numbers_for(pattern, given))
        for name, given in pattern.rule.scalars.items()
    }


def vary(builder: Builder, planted: Planted) -> None:
    """Change, now and then, when and where the pattern runs, in ways that leave it one."""
    late = builder.chance(15) and may_arrive_late(planted.pattern, example_trace(planted.pattern))
    if late and planted.ready():  # of integers nothing is
        arrives_late(builder, planted)
    if builder.chance(15):
        on_a_stream(builder, planted)


def _small(builder: Builder, name: str) -> str:
    """The integer value ``name``, or what it leaves when divided by eight."""
    value = builder.values[name]
    if value.dtype.is_floating_point:
        return name
    return builder.emit("aten.remainder.Scalar", name, 8, shape=value.shape, dtype=value.dtype)


def _spoilable(pattern: Pattern, vanishing: list[str], steps: Sequence[Step]) -> list[str]:
    """The values between the operators whose change leaves nothing that fuses."""
    if not operands_of(pattern.name).contains_another:
        return vanishing
    return [name for name in vanishing if Ref(name) in steps[-1].args]
