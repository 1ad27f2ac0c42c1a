"""A pattern's steps for sizes that are not known yet: traced once, filled in for each program.

Tracing a search function costs more than all the rest of drawing a program. So it is traced for sizes that are large
primes, twice with different ones; a number in the trace that is a product of these primes stands for the product of
these sizes. Where the two traces disagree, or the function does not take such sizes, it is traced for each program.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from npugraph_ex.testing.inputs import Dim, size_of
from npugraph_ex.testing.patterns import Pattern, Traced
from npugraph_ex.testing.program import Ref, Step

_PRIMES = ((11, 13, 17, 19, 23, 29, 31, 37), (41, 43, 47, 53, 59, 61, 67, 71))
_SCALAR = 0.01171875
"""The first number that stands for a scalar while tracing, exact in every dtype; the next ones are its multiples."""


@dataclass(frozen=True)
class Template:
    """A trace whose numbers are ``Size``s where they follow from the sizes of the arguments."""

    steps: tuple[Step, ...]
    outputs: tuple[str, ...]
    vanishing: tuple[str, ...]
    metas: Mapping[str, tuple[tuple[Any, ...], torch.dtype]]


@dataclass(frozen=True)
class Size:
    """A product of sizes, each named by the number that it has among those of the arguments."""

    names: tuple[str, ...]

    def value(self, values: Mapping[str, int]) -> int:
        """The number that it is."""
        return math.prod(values[name] for name in self.names)


@dataclass(frozen=True)
class Scalar:
    """A numeric argument of the search function."""

    name: str


@dataclass(frozen=True)
class Filled:
    """A pattern's steps for the arguments of one program.

    Attributes:
        traced: with the numbers of the program's first call.
        results: symbolic shape and dtype of each result.
        burnt_in: whether other values of the symbols would need other steps.
    """

    traced: Traced
    results: Mapping[str, tuple[tuple[Dim, ...], torch.dtype]]
    burnt_in: bool


def fill(
    pattern: Pattern,
    shapes: Mapping[str, tuple[Dim, ...]],
    dtypes: Mapping[str, torch.dtype],
    scalars: Mapping[str, float],
    sizes: Mapping[str, int],
) -> Filled:
    """The steps of ``pattern`` for arguments of these symbolic shapes.

    Args:
        pattern: what is planted.
        shapes: of each argument.
        dtypes: of each argument.
        scalars: the numeric arguments.
        sizes: the values of the symbols in the program's first call.
    """
    names: dict[Dim, str] = {}
    for shape in shapes.values():
        for dim in shape:
            names.setdefault(dim, str(len(names)))
    template = None if 0 in sizes.values() else _template(pattern, shapes, dtypes, names)
    if template is None:
        return _for_these_sizes(pattern, shapes, dtypes, scalars, sizes)
    values = {name: size_of(dim, sizes) for dim, name in names.items()}

    def number(part: Any) -> Any:
        if isinstance(part, Size):
            return part.value(values)
        return scalars[part.name] if isinstance(part, Scalar) else part

    metas = {name: (_substituted(shape, number), dtype) for name, (shape, dtype) in template.metas.items()}
    traced = Traced(_with(template.steps, number), template.outputs, template.vanishing, metas)
    symbolic = {name: dim for dim, name in names.items() if isinstance(dim, str)}
    results = {
        name: (tuple(_dim(part, symbolic, values) for part in shape), dtype)
        for name, (shape, dtype) in template.metas.items()
    }
    return Filled(traced, results, any(_mentions(step, symbolic) for step in template.steps))


def _dim(part: Any, symbolic: Mapping[str, Dim], values: Mapping[str, int]) -> Dim:
    """A symbolic size: a product of symbols and a number."""
    if not isinstance(part, Size):
        return int(part)
    free = [str(symbolic[name]) for name in part.names if name in symbolic]
    fixed = math.prod(values[name] for name in part.names if name not in symbolic)
    return "*".join([*free, *([str(fixed)] if fixed != 1 else [])]) if free else fixed


def _mentions(step: Step, symbolic: Mapping[str, Dim]) -> bool:
    found: list[bool] = []

    def look(part: Any) -> Any:
        found.append(isinstance(part, Size) and any(name in symbolic for name in part.names))
        return part

    _with((step,), look)
    return any(found)


def _for_these_sizes(
    pattern: Pattern,
    shapes: Mapping[str, tuple[Dim, ...]],
    dtypes: Mapping[str, torch.dtype],
    scalars: Mapping[str, float],
    sizes: Mapping[str, int],
) -> Filled:
    concrete = {name: [size_of(dim, sizes) for dim in shape] for name, shape in shapes.items()}
    traced = pattern.trace(concrete, dtypes, scalars)
    symbols = {size_of(dim, sizes): dim for shape in shapes.values() for dim in shape}
    results = {
        name: (tuple(symbols.get(size, size) for size in shape), dtype) for name, (shape, dtype) in traced.metas.items()
    }
    return Filled(traced, results, burnt_in=True)


_templates: dict[object, Template | None] = {}


def _template(
    pattern: Pattern,
    shapes: Mapping[str, tuple[Dim, ...]],
    dtypes: Mapping[str, torch.dtype],
    names: Mapping[Dim, str],
) -> Template | None:
    """The template for arguments whose sizes are equal where those of ``shapes`` are; None where there is none."""
    layout = tuple((name, tuple(int(names[dim]) for dim in shape), dtypes[name]) for name, shape in shapes.items())
    key = (pattern.rule, layout)
    if key not in _templates:
        _templates[key] = _new_template(pattern, layout)
    return _templates[key]


def _new_template(pattern: Pattern, layout: Sequence[tuple[str, tuple[int, ...], torch.dtype]]) -> Template | None:
    if 1 + max((number for _, numbers, _ in layout for number in numbers), default=0) > len(_PRIMES[0]):
        return None
    try:
        first, second = (_traced_for(pattern, layout, primes) for primes in _PRIMES)
    except Exception:  # noqa: BLE001 - a search function may refuse odd sizes in any way; each program then asks itself
        return None
    return first if first == second else None


def _traced_for(
    pattern: Pattern, layout: Sequence[tuple[str, tuple[int, ...], torch.dtype]], primes: Sequence[int]
) -> Template:
    shapes = {name: [primes[number] for number in numbers] for name, numbers, _ in layout}
    scalars = {name: _SCALAR * (position + 1) for position, name in enumerate(pattern.scalars)}
    traced = pattern.trace(shapes, {name: dtype for name, _, dtype in layout}, scalars)
    named = {value: Scalar(name) for name, value in scalars.items()}

    def general(part: Any) -> Any:
        if isinstance(part, float):
            return named.get(part, part)
        return _product(part, primes) if type(part) is int else part

    metas = {name: (_substituted(shape, general), dtype) for name, (shape, dtype) in traced.metas.items()}
    return Template(_with(traced.steps, general), traced.outputs, traced.vanishing, metas)


def _product(number: int, primes: Sequence[int]) -> Any:
    """``number`` as a product of sizes, named by their places; the number itself if it is none."""
    rest, factors = number, []
    for position, prime in enumerate(primes):
        while rest > 1 and rest % prime == 0:
            rest //= prime
            factors.append(str(position))
    return Size(tuple(factors)) if rest == 1 and factors else number


def _with(steps: Sequence[Step], change: Callable[[Any], Any]) -> tuple[Step, ...]:
    """The steps with every argument that is no value of the program changed."""
    return tuple(
        Step(
            step.operator,
            tuple(_substituted(arg, change) for arg in step.args),
            tuple((name, _substituted(arg, change)) for name, arg in step.kwargs),
            step.results,
        )
        for step in steps
    )


def _substituted(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, Ref):
        return value
    return tuple(_substituted(item, change) for item in value) if isinstance(value, (tuple, list)) else change(value)
