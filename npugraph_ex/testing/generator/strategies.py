"""Random programs around a planted pattern, its near-misses, and integer programs without one.

Each kind is a function of ``Choices``. ``programs`` and ``integer_programs`` are hypothesis strategies over them, which
shrink; ``sample`` draws one program from a seed, thirty times faster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from hypothesis import strategies as st

from npugraph_ex.fusion.rules import SIXTEEN_BITS as DTYPES
from npugraph_ex.fusion.rules import operands_of
from npugraph_ex.testing.arguments import check_least, checked
from npugraph_ex.testing.generator.builder import Builder, Value
from npugraph_ex.testing.generator.choices import Choices, Drawn, Sampled
from npugraph_ex.testing.generator.inputs import Dim, Integers, size_of
from npugraph_ex.testing.generator.near_misses import NEAR_MISSES, WRITING, applicable, example_trace, may_arrive_late
from npugraph_ex.testing.generator.numbers import numbers_for, numbers_that_run
from npugraph_ex.testing.generator.order_misses import arrives_late, on_a_stream
from npugraph_ex.testing.generator.patterns import (
    ARGUMENT_STYLES,
    Pattern,
    check_name,
    registered_patterns,
    respelt,
    with_style,
)
from npugraph_ex.testing.generator.planted import Planted, renamed
from npugraph_ex.testing.generator.program import Program, Ref, Step
from npugraph_ex.testing.generator.sized_patterns import sized
from npugraph_ex.testing.generator.undeclared_views import view_a_copy
from npugraph_ex.testing.generator.variations import moved, with_equal_sizes, with_own_values, with_returned_views
from npugraph_ex.testing.generator.written_parts import write_parts

CALLS = 4
_MULTIPLES = (4, 2, 8, 1)
FEWEST_ROWS = 2
_ROWS = (FEWEST_ROWS, 3, 5, 6, 7)
_LARGE = 64
Spec = tuple[tuple[Dim, ...], torch.dtype]
"""Shape and dtype of an argument of a pattern."""


def _sizes(builder: Builder, *, dynamic: bool, zero: bool) -> tuple[dict[str, int], ...]:
    """The values of s0 and s1 in each call. In one call all differ, so that no two sizes are equal by accident."""
    if dynamic:
        # Two calls share their sizes: the second of them replays what the first captured.
        first, second = builder.choices.order(_ROWS), builder.choices.order(_ROWS)
        rows = (first, second, first, first)
        return tuple({"s0": row[0], "s1": row[1]} for row in rows)
    s0 = 0 if zero else builder.pick((2, 3, 1, 5))
    return ({"s0": s0, "s1": 4},) * CALLS


def _shapes(builder: Builder, pattern: Pattern, *, leading: int) -> dict[str, tuple[Dim, ...]]:
    """A symbolic shape for each argument: one draw for each class of dimensions, ``leading`` dims for the leading one."""
    batch = ("s0", "s1")[:leading]
    drawn: dict[int, tuple[Dim, ...]] = {}
    large = _is_large(pattern)
    for argument in pattern.arguments:
        for size in argument.dims:
            if size == pattern.leading:
                drawn[size] = batch
            elif size not in drawn:
                # What holds for a rule's example sizes (multiples of 128, say) holds for multiples of them; small ones
                # would equal the symbols' values by accident, and where some are large, more would cost time.
                free = [size * times for times in _MULTIPLES if size * times > max(_ROWS)]
                free = [number for number in free if (number,) not in drawn.values()]
                drawn[size] = (min(free) if large else builder.pick(free),)
    return {a.name: tuple(dim for size in a.dims for dim in drawn[size]) for a in pattern.arguments}


def _is_large(pattern: Pattern) -> bool:
    """Whether the pattern's operands are so large that everything around them costs much time."""
    return any(size >= _LARGE for argument in pattern.arguments for size in argument.dims)


def _specs(builder: Builder, pattern: Pattern, dtype: torch.dtype, kind: str | None) -> dict[str, Spec]:
    """A shape and a dtype for each argument of the pattern."""
    if kind == "size":
        refused = builder.pick(operands_of(pattern.name).refused_sizes)
        shapes = {a.name: tuple(refused.get(size, max(size, 1)) for size in a.dims) for a in pattern.arguments}
    else:
        leading = (2,) if kind == "dropped keyword" else (1, 1, 2)
        shapes = _shapes(builder, pattern, leading=builder.pick(leading) if pattern.rows else 1)
    # Only what a rule's examples have in 16 bits is of the drawn dtype; float32 scales and integers stay what they are,
    # unless the rule says that they depend on it.
    depending = operands_of(pattern.name).dependent.get(dtype, {})
    own = {a.name: dtype if a.dtype in DTYPES else a.dtype for a in pattern.arguments}
    return {name: (shapes[name], depending.get(name, kind)) for name, kind in own.items()}


def _small(builder: Builder, name: str) -> str:
    """The integer value ``name``, or what it leaves when divided by eight."""
    value = builder.values[name]
    if value.dtype.is_floating_point:
        return name
    return builder.emit("aten.remainder.Scalar", name, 8, shape=value.shape, dtype=value.dtype)


def _densely(builder: Builder, planted: Planted) -> None:
    """Copies of the results in place of them, for a rule that may change their strides only where nobody sees them."""
    for position, name in enumerate(planted.outputs):
        shape, dtype = planted.results[name]
        last = name
        for what in builder.choices.order(("sign", "sum", "halves"))[: builder.choices.number(0, 2)]:
            last = _further(builder, name, last, shape, dtype, what)
        keywords = (("memory_format", torch.contiguous_format),)
        copy = builder.emit("aten.clone.default", last, shape=shape, dtype=dtype, keywords=keywords)
        for between in {name, last}:
            del builder.values[between]
        builder.values[copy] = Value(shape, dtype)
        planted.outputs[position] = copy
        planted.results = {**planted.results, copy: (shape, dtype)}


def _further(builder: Builder, name: str, last: str, shape: tuple[Dim, ...], dtype: torch.dtype, what: str) -> str:
    """A value that has the strides of ``last``, which comes of the result ``name``, or strides of its own."""
    whole = isinstance(shape[-1], int) and shape[-1] % 2 == 0
    if what == "sign" or (what == "halves" and not whole):
        made = builder.emit("aten.neg.default", last, shape=shape, dtype=dtype)
    elif what == "sum":
        made = builder.emit("aten.add.Tensor", last, name, shape=shape, dtype=dtype)
    else:
        half = (*shape[:-1], int(shape[-1]) // 2)
        parts = builder.emit_parts("aten.split.Tensor", last, half[-1], -1, shapes=(half, half), dtype=dtype)
        made = builder.emit("aten.cat.default", parts, -1, shape=shape, dtype=dtype)
        for part in parts:
            del builder.values[part]
    if last != name:
        del builder.values[last]
    return made


def _plant(  # noqa: PLR0913, PLR0917 - each is one thing that is drawn before
    builder: Builder,
    pattern: Pattern,
    near_miss: str | None,
    specs: Mapping[str, Spec],
    integers: Mapping[str, Integers],
    calls: Sequence[dict[str, int]],
    depth: int,
) -> Planted:
    """Make arguments of the given shapes and dtypes for the pattern and append its steps."""
    shapes, dtypes = {n: shape for n, (shape, _) in specs.items()}, {n: dtype for n, (_, dtype) in specs.items()}
    names = {
        a.name: builder.new_integers(shapes[a.name], dtypes[a.name], integers[a.name])
        if a.name in integers
        else builder.produce(shapes[a.name], dtypes[a.name], depth)
        for a in pattern.arguments
    }
    if operands_of(pattern.name).small_integers:
        names = {argument: _small(builder, name) for argument, name in names.items()}
    if near_miss is not None or not pattern.rows or builder.chance(80):
        # A fused operator may lay its results out differently for other inputs, and then must not be used. A search
        # function of more than rows may contain a view, which other layouts do not have.
        names = {argument: builder.contiguous(name) for argument, name in names.items()}
    if near_miss is None and builder.chance(25):
        builder.mutate(builder.mutable())
    certain = all(builder.values[name].contiguous for name in names.values())
    wanted = {
        name: builder.pick(
            operands_of(pattern.name).refused_numbers if near_miss == "number" else numbers_for(pattern, given)
        )
        for name, given in pattern.rule.scalars.items()
    }
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


def _vary(builder: Builder, planted: Planted) -> None:
    """Change, now and then, when and where the pattern runs, in ways that leave it one."""
    late = builder.chance(15) and may_arrive_late(planted.pattern, example_trace(planted.pattern))
    if late and planted.ready():  # of integers nothing is
        arrives_late(builder, planted)
    if builder.chance(15):
        on_a_stream(builder, planted)


def _spoilable(pattern: Pattern, vanishing: list[str], steps: Sequence[Step]) -> list[str]:
    """The values between the operators whose change leaves nothing that fuses."""
    if not operands_of(pattern.name).contains_another:
        return vanishing
    return [name for name in vanishing if Ref(name) in steps[-1].args]


def _outputs(builder: Builder, always: Sequence[str]) -> tuple[str, ...]:
    """What the program returns: the given values, and some others."""
    others = [name for name in builder.values if name not in always and not name.startswith("x")]
    count = builder.choices.number(0, min(3, len(others)))
    chosen = [str(builder.pick(others)) for _ in range(count)]
    if builder.chance(10):
        chosen.append(str(builder.pick(builder.values)))
    return tuple(dict.fromkeys((*always, *chosen)))


Maker = Callable[[Choices], Program]
"""Makes one program of some kind."""


@checked
def planted_programs(  # noqa: PLR0913 - each is one thing to fix; the rest is drawn
    *,
    pattern: Pattern | str,
    near_miss: str | bool | None = False,
    dtype: torch.dtype | None = None,
    dynamic: bool | None = None,
    functional: bool | None = None,
    exactly: Mapping[str, Spec] | None = None,
    integers: Mapping[str, Integers] | None = None,
    prefix: int = 3,
) -> Maker:
    """What makes random programs around a planted pattern; the arguments are those of ``programs``.

    ``integers`` has the least and the largest number of each argument that cannot be any, such as an index.
    """
    if isinstance(near_miss, str) and near_miss not in NEAR_MISSES:
        raise ValueError(f"near_miss must be one of {', '.join(NEAR_MISSES)}; it is {near_miss!r}.")
    if isinstance(pattern, str):
        check_name(pattern)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"dtype must be a floating-point torch.dtype; it is {dtype!r}.")
    check_least("prefix", prefix, 0)
    if exactly is not None:
        _check_names(pattern, exactly)
    return partial(
        _planted, pattern=pattern, near_miss=near_miss, dtype=dtype, dynamic=dynamic, functional=functional,
        exactly=exactly, integers=integers or {}, prefix=prefix,
    )  # fmt: skip


def _check_names(pattern: Pattern | str, exactly: Mapping[str, Spec]) -> None:
    """Refuse arguments that the pattern has not, or has as well."""
    (chosen, *_) = registered_patterns(pattern) if isinstance(pattern, str) else (pattern,)
    wanted = {argument.name for argument in chosen.arguments}
    if wanted != exactly.keys():
        raise ValueError(f"exactly must name {', '.join(sorted(wanted))}; it names {', '.join(exactly) or 'nothing'}.")


def _planted(  # noqa: PLR0913 - as ``planted_programs``
    choices: Choices,
    *,
    pattern: Pattern | str,
    near_miss: str | bool | None,
    dtype: torch.dtype | None,
    dynamic: bool | None,
    functional: bool | None,
    exactly: Mapping[str, Spec] | None,
    integers: Mapping[str, Integers],
    prefix: int,
) -> Program:
    builder = Builder(choices)
    variants = registered_patterns(pattern) if isinstance(pattern, str) else (pattern,)
    kind: str | None = near_miss if isinstance(near_miss, str) else None
    # Of some variants of a rule nothing is a near-miss.
    wanted = [
        one for one in variants if not near_miss or (applicable(one) if kind is None else kind in applicable(one))
    ]
    if not wanted:
        raise ValueError(f"no near-miss {'' if kind is None else repr(kind)} of {variants[0].name} is known.")
    chosen = builder.pick(wanted)
    constraints = operands_of(chosen.name)
    if near_miss is True:
        kind = str(builder.pick(applicable(chosen)))
    wide = kind == "dtype"
    drawn_dtype = torch.float32 if wide else dtype or builder.pick(DTYPES if kind == "number" else constraints.dtypes)
    is_dynamic = kind != "empty" and (builder.chance(35) if dynamic is None else dynamic)
    is_functional = builder.chance(70) if functional is None else functional
    if kind in WRITING:
        is_functional = False
    empty = kind == "empty" or (kind is None and constraints.takes_empty and not is_dynamic and builder.chance(15))
    sizes = _sizes(builder, dynamic=is_dynamic, zero=empty)
    alone = kind is not None and constraints.occurs_by_chance
    planted = _plant(
        builder,
        chosen,
        kind,
        exactly or _specs(builder, chosen, drawn_dtype, kind),
        integers,
        sizes,
        0 if alone else min(prefix, 1) if _is_large(chosen) else prefix,
    )
    if planted.burnt_in:
        is_dynamic, sizes = False, (sizes[0],) * CALLS
    runs = True
    if kind is not None:
        runs = NEAR_MISSES[kind](builder, planted)
    else:
        _vary(builder, planted)
    builder.steps.extend(planted.steps)
    for name in planted.outputs:
        builder.values[name] = planted.value(name)
    if chosen.rule.free_strides:
        _densely(builder, planted)
    for _ in range(choices.number(0, 4) if runs and not alone else 0):
        builder.consume()
    if runs and not alone and builder.chance(20):
        builder.mutate(builder.mutable())
    exact = [name for name in planted.outputs if not planted.results[name][1].is_floating_point]
    exact = exact or planted.outputs[:1]
    rest = [name for name in planted.outputs if name not in exact and builder.chance(75)]
    program = Program(
        inputs=tuple(builder.inputs),
        steps=tuple(builder.steps),
        outputs=_outputs(builder, [*exact, *rest, *planted.also_returned]),
        sizes=sizes,
        dynamic=is_dynamic,
        functional=is_functional,
        pattern=chosen.name,
        dtype=str(drawn_dtype).removeprefix("torch."),
        near_miss=kind,
        expected=0 if kind is not None else 1 if planted.certain and not constraints.occurs_by_chance else None,
        runs=runs,
    )
    return moved(choices, program, builder.values)


@checked
def exact_programs(*, dynamic: bool | None = None) -> Maker:
    """What makes random int32 programs; the argument is that of ``integer_programs``."""
    return partial(_integers, dynamic=dynamic)


def _integers(choices: Choices, *, dynamic: bool | None) -> Program:
    builder = Builder(choices)
    is_dynamic = builder.chance(30) if dynamic is None else dynamic
    shape: tuple[Dim, ...] = builder.pick((("s0", 8), ("s0",), (4, 4), ("s0", "s1", 4), (4, 4), (8,)))
    for _ in range(choices.number(1, 4)):
        builder.new_input(shape, torch.int32)
    _go_on(builder, choices.number(1, 14))
    made = [name for name in builder.values if name.startswith("v")]
    if not made:
        made = [builder.emit("aten.add.Tensor", "x0", 1, shape=shape, dtype=torch.int32)]
    outputs = _outputs(builder, made[-1:])
    sizes = _sizes(builder, dynamic=is_dynamic, zero=not is_dynamic and builder.chance(8))
    functional = builder.chance(60)
    for further in (view_a_copy, write_parts):
        if not builder.chance(25):
            continue
        further(builder)
        _go_on(builder, choices.number(0, 4))
        outputs = _outputs(builder, [*outputs, [name for name in builder.values if name.startswith("v")][-1]])
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


@checked
def programs(  # noqa: PLR0913 - each is one thing to fix; the rest is drawn
    *,
    pattern: Pattern | str,
    near_miss: str | bool | None = False,
    dtype: torch.dtype | None = None,
    dynamic: bool | None = None,
    functional: bool | None = None,
    exactly: Mapping[str, Spec] | None = None,
    prefix: int = 3,
) -> st.SearchStrategy[Program]:
    """Random programs around a planted pattern.

    Args:
        pattern: what to plant: a registered pattern, or the name of a rule, of which a variant is drawn.
        near_miss: False for programs that must be fused, True for any near-miss, or the name of one.
        dtype: of the pattern's floating-point arguments; drawn when None.
        dynamic: whether to compile for symbolic shapes; drawn when None.
        functional: whether in-place steps are functionalised before the passes; drawn when None.
        exactly: shape and dtype of each of the pattern's arguments, by name; drawn when None.
        prefix: how many operators deep the pattern's arguments are computed at most; 0 for inputs alone.

    Raises:
        ValueError: there is no such rule or near-miss, dtype is no floating-point dtype, or prefix is below zero.
    """
    make = planted_programs(
        pattern=pattern, near_miss=near_miss, dtype=dtype, dynamic=dynamic, functional=functional, exactly=exactly,
        prefix=prefix,
    )  # fmt: skip
    return _drawn(make)


@st.composite
def _drawn(draw: Any, make: Maker) -> Program:
    return make(Choices(Drawn(draw)))


@checked
def integer_programs(*, dynamic: bool | None = None) -> st.SearchStrategy[Program]:
    """Random int32 programs of xor, add, views and in-place writes: any misorder in replay is an exact difference.

    Args:
        dynamic: whether to compile for symbolic shapes; drawn when None.
    """
    return _drawn(exact_programs(dynamic=dynamic))


@checked
def sample(maker: Maker, seed: int | str) -> Program:
    """The program that a seed stands for.

    Args:
        maker: of ``planted_programs`` or ``exact_programs``.
        seed: any number or text.

    Raises:
        TypeError: maker is something else.
    """
    program = maker(Choices(Sampled(seed)))
    if not isinstance(program, Program):
        raise TypeError(f"sample(maker=...) must make a Program; it made {program!r}.")
    return program
