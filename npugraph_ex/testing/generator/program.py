"""A program as data: typed steps over named values, which render to a plain Python function that anyone can run."""

from __future__ import annotations

import inspect
import linecache
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from types import CodeType
from typing import Any

import torch

from npugraph_ex import _torch_private
from npugraph_ex.graph.streams import ops as _stream_operators  # noqa: F401 - programs call the operators that it defines
from npugraph_ex.testing.arguments import check_fields
from npugraph_ex.testing.generator.inputs import Input


@dataclass(frozen=True)
class Ref:
    """A value of the program, by name."""

    name: str


@dataclass(frozen=True)
class Step:
    """One operator call.

    Attributes:
        operator: as under ``torch.ops``: "aten.add.Tensor".
        args: ``Ref``s, numbers, dtypes, devices and the like, strings, None, and tuples of these.
        kwargs: keyword arguments, as pairs.
        results: the names that the results get; none for a call made for its effect.
    """

    operator: str
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()
    results: tuple[str, ...] = ()

    def render(self) -> str:
        """The step as a line of Python."""
        arguments = [literal(value) for value in self.args]
        arguments += [f"{name}={literal(value)}" for name, value in self.kwargs]
        call = f"torch.ops.{self.operator}({', '.join(arguments)})"
        if not self.results:
            return call
        # A list of one is still a list, as that of `split` into parts that are larger than the tensor.
        comma = "," if len(self.results) == 1 and _returns_list(self.operator) else ""
        return f"{', '.join(self.results)}{comma} = {call}"


@lru_cache(maxsize=1024)
def _returns_list(operator: str) -> bool:
    """Whether an operator returns a list of tensors."""
    *_, namespace, name, overload = operator.split(".")
    returns = _torch_private.schema(getattr(getattr(getattr(torch.ops, namespace), name), overload)).returns
    return len(returns) == 1 and str(returns[0].type) == "List[Tensor]"


def literal(value: Any) -> str:
    """An operator's argument as Python, where torch is the only name that is known; a tuple becomes a list."""
    if isinstance(value, Ref):
        return value.name
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(literal, value))}]"
    if isinstance(value, complex):
        return f"complex({literal(value.real)}, {literal(value.imag)})"
    if isinstance(value, torch.device):
        return f"torch.{value!r}"
    if isinstance(value, float) and not math.isfinite(value):
        return f"float('{value}')"
    return str(value) if isinstance(value, (torch.dtype, torch.memory_format)) else repr(value)


@dataclass(frozen=True)
class Program:
    """A drawn program, and what the check expects of it.

    Attributes:
        inputs: its arguments x0, x1, ...
        steps: in order.
        outputs: the names of the values that it returns.
        sizes: for each call, the values of the symbols in input shapes.
        dynamic: whether it is compiled for symbolic shapes.
        functional: whether in-place steps are functionalised before the passes, as AOT does.
        pattern: the name of the planted rule.
        dtype: of the planted pattern.
        near_miss: what keeps the pattern from being fused; None where it must fuse.
        expected: how many fusions must happen, exactly; None where that depends on how operators lay out results.
        runs: False for a program whose operators have no kernel: only the graph is checked.
        overflow: whether its inputs are so large that eager mode may overflow; where it does, nothing is asked.
    """

    inputs: tuple[Input, ...]
    steps: tuple[Step, ...]
    outputs: tuple[str, ...]
    sizes: tuple[dict[str, int], ...] = field(default=({},), hash=False)
    dynamic: bool = False
    functional: bool = True
    pattern: str | None = None
    dtype: str = ""
    near_miss: str | None = None
    expected: int | None = None
    runs: bool = True
    overflow: bool = False

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def source(self) -> str:
        """The program as a Python function called ``program``."""
        names = ", ".join(f"x{position}" for position in range(len(self.inputs)))
        returned = f"({', '.join(self.outputs)}{',' if len(self.outputs) == 1 else ''})"
        lines = [f"def program({names}):", *(step.render() for step in self.steps), f"return {returned}"]
        return "\n    ".join(lines) + "\n"

    def function(self) -> Callable[..., Any]:
        """The program, callable; errors in it show its source lines."""
        return function_of(self.source)

    def __repr__(self) -> str:
        """The source, for the reader of a failing example."""
        return f"<Program {self.pattern} near_miss={self.near_miss} expected={self.expected}\n{self.source}>"


@lru_cache(maxsize=256)  # a program is checked along several ways
def _compiled(source: str) -> CodeType:
    """The code of a module; errors in it show its source lines."""
    name = f"<program {abs(hash(source)):x}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    return compile(source, name, "exec")


_KINDS = inspect.CO_OPTIMIZED | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
"""What tells the code of a function from that of a class and of an ``async def``, which computes nothing when called."""


def check_source(source: str, inputs: int) -> None:
    """Raise ValueError unless ``source`` is the text of a function ``program`` of so many arguments."""
    try:
        constants = _compiled(source).co_consts
    except SyntaxError as error:
        raise ValueError(f"Case.source must be Python: {error.msg} in line {error.lineno}.") from error
    functions = [
        one for one in constants if isinstance(one, CodeType) and one.co_flags & _KINDS == inspect.CO_OPTIMIZED
    ]
    program = next((function for function in functions if function.co_name == "program"), None)
    if program is None:
        raise ValueError(f"Case.source must be the text of a function called program; it is {source!r}.")
    if program.co_argcount != inputs and not program.co_flags & inspect.CO_VARARGS:
        raise ValueError(f"Case.inputs must be {program.co_argcount} as program takes; they are {inputs}.")


def function_of(source: str) -> Callable[..., Any]:
    """Compile the text of one function called ``program``; torch is the only name that it knows."""
    scope: dict[str, Any] = {"torch": torch}
    exec(_compiled(source), scope)  # noqa: S102 - the text was rendered from a Program above
    function: Callable[..., Any] = scope["program"]
    return function
