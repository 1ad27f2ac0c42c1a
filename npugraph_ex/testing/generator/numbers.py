"""The numbers in a pattern and in its replacement: inputs near them show a bound that is off by one, which others miss."""

from __future__ import annotations

import dataclasses
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from npugraph_ex import _torch_private
from npugraph_ex.fusion import tracing
from npugraph_ex.fusion.rule import FusionRule
from npugraph_ex.fusion.rules import RULE_NAMES, operands_of
from npugraph_ex.testing.generator.patterns import Pattern, schema_of
from npugraph_ex.testing.generator.program import Program, Step
from npugraph_ex.testing.rounding import rounds_to_whole

_MOST = 16
_AN_EPSILON = 0.01
_SMALLEST_INTEGER = 3
"""Smaller integers are mostly dimensions."""
_TIES = (0.5, 1.5, 2.5)
"""Halves, where `round` jumps: the even whole number beside them is below, above and below."""
_WHOLE = (1.0, 2.0, 3.0)
"""Where what rounds down, up or towards zero jumps."""
_ODD = 3.0
"""An odd power keeps the sign, an even one does not."""
_INEXACT = 41.0
"""Its inverse in float16 and float32 is too small: its multiples times that are just below whole numbers."""
_LARGE = 2.0**30
"""From here on a number is no bound of ordinary values: -1e9 fills a mask."""
_MOST_FACTORS = 4
_AROUND: tuple[Callable[[int], int], ...] = (
    lambda size: size + 1, lambda size: -size - 1, lambda size: size, lambda size: -size,
    lambda size: size - 1, lambda size: 1 - size, lambda size: 2 * size + 1, lambda size: -2 * size - 1,
)  # fmt: skip
"""Where a whole number that is compared with a size may change sides."""


def numbers_for(pattern: Pattern, given: float) -> tuple[float, ...]:
    """What a numeric argument is in programs: a rule matches any number there, not only the one that it is traced with.

    One that is smaller than a hundredth is taken for an epsilon, which no program makes negative. A whole number may be a dimension
    or a count.
    """
    constraints = operands_of(pattern.name)
    if pattern.name in RULE_NAMES:
        return (given,) if isinstance(given, int) else constraints.numbers
    if isinstance(given, bool):
        return (given, not given)
    if isinstance(given, int):
        return (*dict.fromkeys((given, 0, 1, given + 1, -given)), given + 0.5)
    if abs(given) < _AN_EPSILON:
        return (given, *constraints.numbers, 0.5, 2.0)
    # Numbers of floating-point tensors may be written without a point.
    usual = (given, -given, 2 * given, 0.0, 0.5, 2, 1.0, _ODD, _INEXACT)
    return (*usual, *(number for number in _beyond(pattern.rule) if number not in usual))


def _beyond(rule: FusionRule) -> tuple[float, ...]:
    """More than the largest number of the replacement, where it has one: of two bounds the other one holds there."""
    numbers = [number for number in _of_replacement(rule) if number < _LARGE]
    return (2 * max(numbers),) if numbers and max(numbers) > 1 else ()


def numbers_at_sizes(pattern: Pattern, given: float, sizes: Sequence[int]) -> tuple[int, ...]:
    """What a whole number is tried at, too: each size and around it, just beyond each first; nothing for any other argument."""
    if not isinstance(given, int) or isinstance(given, bool) or pattern.name in RULE_NAMES:
        return ()
    usual, found = numbers_for(pattern, given), (at(size) for at in _AROUND for size in dict.fromkeys(sizes))
    return tuple(number for number in dict.fromkeys(found) if number not in usual)


def numbers_that_run(
    given: Mapping[str, float], chosen: Mapping[str, float], trace: Callable[[Mapping[str, float]], object]
) -> Mapping[str, float]:
    """``chosen``, or with the given whole numbers where the search function raises, as for a dimension that is not there."""
    whole = {name: number for name, number in given.items() if isinstance(number, int)}
    if all(chosen[name] == number for name, number in whole.items()):
        return chosen
    try:
        trace(chosen)
    except Exception:  # noqa: BLE001 - a user's function raises what it likes
        return {**chosen, **whole}
    return chosen


def near_numbers(program: Program, rules: Iterable[FusionRule]) -> Program:
    """The program with inputs near the numbers of the planted pattern and of the replacements of these rules.

    Where the pattern rounds, also with inputs that these numbers, as factors or divisors, turn into ties.
    """
    planted = [step for step in program.steps if any(name.startswith("p") for name in step.results)]
    found = [number for step in planted for number in _numbers(schema_of(step), step.args, dict(step.kwargs))]
    found += [number for rule in rules for number in _of_replacement(rule)]
    distinct = tuple(dict.fromkeys(found))[:_MOST]
    jumping = {name for step in planted if rounds_to_whole(name := _name_of(step), dict(step.kwargs))}
    jumps = (_TIES if "round" in jumping else ()) + (_WHOLE if jumping - {"round"} else ())
    return around(program, (*distinct, *_ties(distinct, jumps)))


def _name_of(step: Step) -> str:
    return schema_of(step).name.split("::")[1]


def _ties(numbers: Sequence[float], jumps: Sequence[float]) -> tuple[float, ...]:
    """Where the pattern jumps, and what comes to lie there by one of the numbers as a factor or as a divisor."""
    factors = [1.0, *(number for number in numbers if number not in (0.0, 1.0))][:_MOST_FACTORS]
    found = [value for jump in jumps for factor in factors for value in (jump / factor, jump * factor)]
    return tuple(dict.fromkeys(found))


def around(program: Program, numbers: tuple[float, ...]) -> Program:
    """The program with inputs near these numbers; indices and masks stay."""
    inputs = tuple(
        x if x.below is not None or x.torch_dtype == torch.bool else dataclasses.replace(x, around=numbers)
        for x in program.inputs
    )
    return dataclasses.replace(program, inputs=inputs)


def numbers_in_graph(graph: fx.Graph) -> tuple[float, ...]:
    """The magnitudes of the numbers that operators of a graph are given, or have as defaults; at most 16."""
    calls = [node for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    found = [
        number for node in calls for number in _numbers(_torch_private.schema(node.target), node.args, node.kwargs)
    ]
    return tuple(dict.fromkeys([*found, *_ends_of_integers(calls)]))[:_MOST]


def _ends_of_integers(calls: Iterable[fx.Node]) -> Iterator[float]:
    """Just beyond the largest number of each integer dtype that floating-point numbers are turned into."""
    for node in calls:
        dtype = node.kwargs.get("dtype")
        if not isinstance(dtype, torch.dtype) or dtype.is_floating_point or dtype == torch.bool:
            continue
        if rounds_to_whole(_operator_of(node), node.kwargs):
            yield float(torch.iinfo(dtype).max + 1)


def _operator_of(node: fx.Node) -> str:
    return _torch_private.schema(node.target).name.split("::")[1]  # type: ignore[arg-type]


@cache
def _of_replacement(rule: FusionRule) -> tuple[float, ...]:
    with FakeTensorMode(allow_non_fake_inputs=True):
        examples = map(tracing.fresh, rule.example_inputs())  # a real tensor would be computed with
        names = inspect.signature(rule.search).parameters
        given = [rule.scalars[name] if name in rule.scalars else next(examples) for name in names]
        return numbers_in_graph(tracing.trace(rule.replace, given, rule.trace_fn).graph)


def _numbers(schema: torch.FunctionSchema, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[float]:
    """The magnitudes of single numbers: floating-point ones, and integers that can be no dimension."""
    for position, argument in enumerate(schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name, argument.default_value)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            if isinstance(value, int) and abs(value) >= sys.maxsize:
                continue  # "to the end", of a slice
            exact = any(kind in str(argument.type) for kind in ("float", "number", "Tensor"))
            if exact or abs(value) >= _SMALLEST_INTEGER:
                yield abs(float(value))
