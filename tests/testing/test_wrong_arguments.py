"""The toolkit says what is wrong with an argument when it is given, not when it is used."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

from npugraph_ex import testing
from npugraph_ex.testing import Case, Input, Limits, judge_floating, judge_quantised
from npugraph_ex.testing.arguments import checked

RULE = "add_rms_norm_dynamic_quant"
NEG = "def program(x0):\n    return (torch.ops.aten.neg.default(x0),)\n"
ROW = (Input((4,)),)
WIDE = torch.zeros(3, dtype=torch.float64)
MAKER = testing.exact_programs()
Y = {"y": ((4,), torch.float16)}
WRONG: dict[str, tuple[str, Callable[[], object]]] = {
    "a negative size": ("Input.shape", lambda: Input((-4,))),
    "a symbol that is none": ("Input.shape", lambda: Input(("s0 + 1",))),
    "a layout": ("Input.layout .*transposed", lambda: Input((4,), layout="weird")),  # type: ignore[arg-type]
    "an alias": ("Input.alias_of", lambda: Input((4,), alias_of=-1)),
    "a scale": ("Input.scale", lambda: Input((4,), scale=math.nan)),
    "a dtype's name": ("Input.dtype .*float17", lambda: Input((4,), "float17")),
    "a size that is not given": ("must name s0", lambda: testing.make_inputs([Input(("s0",))], device="cpu")),
    "no function called program": ("function called program", lambda: Case("def foo(x): return x", ROW)),
    "no function but a coroutine": ("Case.source must be .* function", lambda: Case("async def program(x0): ...", ROW)),
    "no Python": ("Case.source must be Python: .* line 1", lambda: Case("def program(:", ROW)),
    "too many inputs": ("Case.inputs must be 1 as program takes; they are 2", lambda: Case(NEG, ROW * 2)),
    "a number of fusions": ("Case.expected must be >= 0", lambda: Case(NEG, ROW, expected=-1)),
    "a route": ("route must be one of fx, graph", lambda: testing.find_failure(MAKER, examples=1, route="typo")),
    "an option of a search": ("nope", lambda: testing.find_failure(MAKER, examples=1, options={"nope": 1})),
    "no programs": ("examples must be >= 1", lambda: testing.find_failure(MAKER, examples=0)),
    "tries": ("tries must be >= 0", lambda: testing.shrink(testing.sample(MAKER, 1), bool, tries=-1)),
    "tries of a search": (
        "shrinking_tries must be >= 0",
        lambda: testing.find_failure(MAKER, examples=1, shrinking_tries=-1),
    ),
    "no maker of programs": ("must make a Program; it made 3", lambda: testing.sample(lambda _choices: 3, 1)),  # type: ignore[arg-type, return-value]
    "a negative size in a call": ("s0 must be >= 0", lambda: testing.make_inputs([Input(("s0",))], sizes={"s0": -1})),
    "a complex dtype": ("real torch dtype", lambda: Input((4,), "complex64")),
    "a dtype itself": ("the name of a real torch dtype", lambda: Input((4,), torch.float16)),  # type: ignore[arg-type]
    "arguments of a pattern": (
        "exactly must name .*x1.* it names y",
        lambda: testing.programs(pattern=RULE, exactly=Y),
    ),
    "a mutant": ("no mutant called 'typo'", lambda: testing.mutant("typo")),
    "a narrow spread": ("a spread of float64", lambda: judge_floating(torch.zeros(3), WIDE, spread=torch.zeros(3))),
    "a call without a size": ("must name s0 .* call 1", lambda: Case(NEG, (Input(("s0",)),), ({"s0": 2}, {}))),
    "an option": ("nope", lambda: Case(NEG, ROW, options={"nope": 1})),
    "a rule": (RULE, lambda: testing.programs(pattern="typo")),
    "a near-miss": ("extra user", lambda: testing.programs(pattern=RULE, near_miss="typo")),
    "an integer dtype": ("floating-point", lambda: testing.planted_programs(pattern=RULE, dtype=torch.int32)),
    "a depth": ("prefix", lambda: testing.programs(pattern=RULE, prefix=-1)),
    "no limit": ("n >= 0.5", lambda: Limits(n=math.nan)),
    "an endless limit": ("k >= 1", lambda: Limits(k=math.inf)),
    "integers to judge": (
        "the candidate is torch.int8",
        lambda: judge_floating(torch.zeros(3, dtype=torch.int8), WIDE),
    ),
    "a narrow reference": ("float64", lambda: judge_floating(torch.zeros(3), torch.zeros(3))),
    "a narrow quotient": ("float64", lambda: judge_quantised(torch.zeros(3, dtype=torch.int8), torch.zeros(3))),
    "no examples": ("budget", lambda: testing.kill("replay-ignores-addresses", budget=0)),
    "dtypes by name": ("dtypes", lambda: testing.validate_replacement(torch.neg, torch.neg, [WIDE], dtypes=["half"])),  # type: ignore[list-item]
}


@pytest.mark.parametrize("what", WRONG)
def test_said_when_it_is_given(what: str) -> None:
    """The message names the argument and what it may be."""
    message, give = WRONG[what]
    with pytest.raises((ValueError, TypeError), match=message):
        give()


class Thing:
    """Of no type that anything takes."""


FREE = {"on_case", "write", "layout"}
"""Parameters that are not compared: protocols and literals, or not before they are used."""
FUNCTIONS = {name: value for name in testing.__all__ if inspect.isfunction(value := getattr(testing, name))}
ARGUMENTS = [
    (name, parameter)
    for name, function in FUNCTIONS.items()
    for parameter in inspect.signature(function).parameters.values()
    if parameter.kind is not parameter.VAR_KEYWORD
]
RECORDS = (Case(NEG, ROW), ROW[0], Limits(), testing.sample(MAKER, 1), testing.CORPUS[0], testing.stream_corpus()[0])
FIELDS = [(record, field.name) for record in RECORDS for field in dataclasses.fields(record) if field.name not in FREE]


@pytest.mark.parametrize(("name", "parameter"), ARGUMENTS, ids=lambda value: getattr(value, "name", value))
def test_every_argument_of_every_function_is_compared_with_its_type(name: str, parameter: inspect.Parameter) -> None:
    """A thing of no known type is refused by the function that was given it, which names the argument."""
    with pytest.raises(TypeError, match=rf"{name}\({parameter.name}=...\) must be of type \w"):
        FUNCTIONS[name](**{parameter.name: Thing()})


def test_a_page_of_repr_is_not_printed() -> None:
    """What is long is said by its type."""
    program = testing.sample(MAKER, 1)
    with pytest.raises(TypeError, match=r"^find_guilty\(case=...\) must be of type Case; it is Program\.$"):
        testing.find_guilty(program)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_names_a_keyword_that_it_does_not_have(name: str) -> None:
    """Python's own error, through every decorator."""
    with pytest.raises(TypeError, match=r"\b\w+\(\) got an unexpected keyword argument 'typo'"):
        FUNCTIONS[name](**({"program": NEG, "inputs": ROW} if name == "reproduce" else {}), typo=1)


@pytest.mark.parametrize(
    ("record", "field"), FIELDS, ids=lambda value: getattr(type(value), "__name__", "")[:9] + str(value)[:12]
)
def test_every_field_is_compared_with_its_type(record: Any, field: str) -> None:
    """What a user writes down is refused when it is written down."""
    with pytest.raises(TypeError, match=rf"{type(record).__name__}\.{field} must be "):
        dataclasses.replace(record, **{field: Thing()})


def test_arguments_of_a_stream_builder() -> None:
    """Its methods too, which would put anything into the graph."""
    b = testing.StreamBuilder()
    x = b.input(4)
    wrong: list[Callable[[], object]] = [
        lambda: b.input("4"), lambda: b.on(3), lambda: b.wait(3), lambda: b.wait(b.record(), "x"), lambda: b.uses("a", 3),
        lambda: b.order("a", 4), lambda: b.fork("a", 4), lambda: b.finish(x, 3), lambda: b.item(3, 0), lambda: b.scope(3),
    ]  # type: ignore[list-item, arg-type] # fmt: skip
    for call in wrong:
        with pytest.raises(
            TypeError, match=r"StreamBuilder\.\w+\(\w+=...\) must be of type (\w+)( or SymInt)?; it is "
        ):
            call()


@pytest.mark.parametrize(
    ("hint", "fits", "does_not"),
    [
        (int, (0, -1), (True, 1.0, "1", None)),
        (float, (0, 1.5), (True, "1")),
        (tuple[int, ...], ((), (1, 2), [1]), (1, (1, "2"))),
        (tuple[str, int], (("a", 1),), (("a",), ("a", "b"))),
        (Sequence[str], (["a"], ("a",)), ("a", [1])),
        (Mapping[str, int], ({}, {"a": 1}), ({1: 1}, {"a": "b"}, [])),
        (Callable[[int], int] | None, (abs, None), (3,)),
        (Any, (3, None), ()),
    ],
)
def test_what_fits_a_type(hint: Any, fits: tuple[object, ...], does_not: tuple[object, ...]) -> None:
    """A bool is no number, a text no sequence, a list as good as a tuple."""

    def takes(value: object) -> object:
        return value

    takes.__annotations__ = {"value": hint}
    take = checked(takes)
    for value in fits:
        assert take(value) is value
    for value in does_not:
        with pytest.raises(TypeError, match=r"takes\(value=...\) must be of type"):
            take(value)
