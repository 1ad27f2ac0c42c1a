"""The numbers in a pattern and in its replacement: inputs near them show a bound that is off by one, which others miss."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from npugraph_ex.fusion import tracing
from npugraph_ex.fusion.rule import FusionRule
from npugraph_ex.testing.generator.patterns import schema_of
from npugraph_ex.testing.generator.program import Program

_MOST = 16
_SMALLEST_INTEGER = 3
"""Smaller integers are mostly dimensions."""


def near_numbers(program: Program, rules: Iterable[FusionRule]) -> Program:
    """The program with inputs near the numbers of the planted pattern and of the replacements of these rules."""
    planted = [step for step in program.steps if any(name.startswith("p") for name in step.results)]
    found = [number for step in planted for number in _numbers(schema_of(step), step.args, dict(step.kwargs))]
    found += [number for rule in rules for number in _of_replacement(rule)]
    return around(program, tuple(dict.fromkeys(found))[:_MOST])


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
    found = [number for node in calls for number in _numbers(node.target._schema, node.args, node.kwargs)]
    return tuple(dict.fromkeys(found))[:_MOST]


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
            exact = "float" in str(argument.type) or "number" in str(argument.type)
            if exact or abs(value) >= _SMALLEST_INTEGER:
                yield abs(float(value))
