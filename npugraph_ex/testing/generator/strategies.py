"""Random programs around a planted pattern, its near-misses, and integer programs without one.

Each kind is a function of ``Choices``. ``programs`` and ``integer_programs`` are hypothesis strategies over them, which
shrink; ``sample`` draws one program from a seed, thirty times faster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from hypothesis import strategies as st

from npugraph_ex.fusion.rules import SIXTEEN_BITS, operands_of
from npugraph_ex.testing.arguments import check_least, checked
from npugraph_ex.testing.generator.builder import Builder
from npugraph_ex.testing.generator.choices import Choices, Drawn, Sampled
from npugraph_ex.testing.generator.dense_results import copy_densely
from npugraph_ex.testing.generator.inputs import Integers
from npugraph_ex.testing.generator.integer_program import integer_program
from npugraph_ex.testing.generator.near_misses import NEAR_MISSES, WRITING, applicable
from npugraph_ex.testing.generator.patterns import Pattern, check_name, registered_patterns
from npugraph_ex.testing.generator.planted import Planted
from npugraph_ex.testing.generator.planting import plant, vary
from npugraph_ex.testing.generator.program import Program
from npugraph_ex.testing.generator.returned import returned_values
from npugraph_ex.testing.generator.shapes import CALLS, Spec, drawn_specs, is_large, sizes_of_calls
from npugraph_ex.testing.generator.variations import moved

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
    numbers: Mapping[str, float] | None = None,
    prefix: int = 3,
) -> Maker:
    """What makes random programs around a planted pattern; the arguments are those of ``programs``.

    ``integers`` has the least and the largest number of each argument that cannot be any, such as an index; ``numbers`` has the
    numeric arguments that are not drawn.
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
        exactly=exactly, integers=integers or {}, numbers=numbers or {}, prefix=prefix,
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
    numbers: Mapping[str, float],
    prefix: int,
) -> Program:
    builder = Builder(choices)
    chosen, kind = _variant(builder, pattern, near_miss=near_miss)
    constraints = operands_of(chosen.name)
    wide = kind == "dtype"
    drawn_dtype = (
        torch.float32 if wide else dtype or builder.pick(SIXTEEN_BITS if kind == "number" else constraints.dtypes)
    )
    is_dynamic = kind != "empty" and (builder.chance(35) if dynamic is None else dynamic)
    is_functional = builder.chance(70) if functional is None else functional
    if kind in WRITING:
        is_functional = False
    empty = kind == "empty" or (kind is None and constraints.takes_empty and not is_dynamic and builder.chance(15))
    sizes = sizes_of_calls(builder, dynamic=is_dynamic, zero=empty)
    alone = kind is not None and constraints.occurs_by_chance
    planted = plant(
        builder,
        chosen,
        kind,
        exactly or drawn_specs(builder, chosen, drawn_dtype, kind),
        integers,
        sizes,
        0 if alone else min(prefix, 1) if is_large(chosen) else prefix,
        numbers,
    )
    if planted.burnt_in:
        is_dynamic, sizes = False, (sizes[0],) * CALLS
    runs = True
    if kind is not None:
        runs = NEAR_MISSES[kind](builder, planted)
    else:
        vary(builder, planted)
    builder.steps.extend(planted.steps)
    for name in planted.outputs:
        builder.values[name] = planted.value(name)
    if chosen.rule.free_strides:
        copy_densely(builder, planted)
    for _ in range(choices.number(0, 4) if runs and not alone else 0):
        builder.consume()
    if runs and not alone and builder.chance(20):
        builder.mutate(builder.mutable())
    program = Program(
        inputs=tuple(builder.inputs),
        steps=tuple(builder.steps),
        outputs=returned_values(builder, [*_returned(builder, planted), *planted.also_returned]),
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


def _variant(builder: Builder, pattern: Pattern | str, *, near_miss: str | bool | None) -> tuple[Pattern, str | None]:
    """A variant of the pattern and the kind of its near-miss, None for one that must be fused; drawn where there are several."""
    variants = registered_patterns(pattern) if isinstance(pattern, str) else (pattern,)
    kind: str | None = near_miss if isinstance(near_miss, str) else None
    # Of some variants of a rule nothing is a near-miss.
    wanted = [
        one for one in variants if not near_miss or (applicable(one) if kind is None else kind in applicable(one))
    ]
    if not wanted:
        raise ValueError(f"no near-miss {'' if kind is None else repr(kind)} of {variants[0].name} is known.")
    chosen = builder.pick(wanted)
    return chosen, str(builder.pick(applicable(chosen))) if near_miss is True else kind


def _returned(builder: Builder, planted: Planted) -> list[str]:
    """The pattern's outputs that the program returns: those that are judged by their integers, or the first, and some others."""
    exact = [name for name in planted.outputs if not planted.results[name][1].is_floating_point]
    exact = exact or planted.outputs[:1]
    return [*exact, *(name for name in planted.outputs if name not in exact and builder.chance(75))]


@checked
def exact_programs(*, dynamic: bool | None = None) -> Maker:
    """What makes random int32 programs; the argument is that of ``integer_programs``."""
    return partial(integer_program, dynamic=dynamic)


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
