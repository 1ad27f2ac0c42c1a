"""A case: one program with everything that decides how the oracle checks it; and the outcome."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

from npugraph_ex.config import CompilerConfig
from npugraph_ex.config.compiler_config import apply_flat
from npugraph_ex.fusion.rules import options_for
from npugraph_ex.report.passes import PassReport
from npugraph_ex.testing.arguments import check_fields, check_least
from npugraph_ex.testing.generator.inputs import Input, symbols_of
from npugraph_ex.testing.generator.program import Program, check_source, function_of
from npugraph_ex.testing.oracle.judge import Limits

UNRUNNABLE = "in eager mode it raised"
"""How the failure begins of a case whose program does not run itself: it shows nothing about what was made of it."""
ROUTES = ("fx", "graph", "compile")
"""How a case is checked: the passes alone, on the CPU; without Dynamo; and all of ``torch.compile``."""


def check_route(name: str, route: str) -> None:
    """Raise ValueError where there is no such route."""
    if route not in ROUTES:
        raise ValueError(f"{name} must be one of {', '.join(ROUTES)}; it is {route!r}.")


_CAPTURES: tuple[Mapping[str, Any], ...] = (
    {},
    {"frozen_parameter": True},
    {"clone_output": True},
    {
        "clone_output": True,
        "frozen_parameter": True,
    },  # one capture for all calls: a moved input cannot hide in a new one
)
"""Options that change how results are handed out and which addresses are compared, and no value: inputs are no parameters."""


_NUMERICS_OF = 4
"""One program in so many is compiled with `check_numerics`, which refuses no right program and moves no generator. None with a
pattern: the option undoes a wrong fusion, which then nobody would judge."""

_DIVIDED_OF = 3
"""One program in so many is compiled with a side stream, whose order must be proven."""
_DIVIDED = {"auto_streams": True, "stream_check": "raise"}


def _drawn_options(program: Program) -> Mapping[str, Any]:
    """Which of these a program is checked with, by its text, so that a program is always checked alike."""
    number, capture = divmod(crc32(program.source.encode()), len(_CAPTURES))
    divided = number // _NUMERICS_OF % _DIVIDED_OF == 0
    checked = program.pattern is None and number % _NUMERICS_OF == 0
    return {**_CAPTURES[capture], **({"check_numerics": True} if checked else {}), **(_DIVIDED if divided else {})}


def check_options(options: Mapping[str, Any]) -> None:
    """Raise the configuration's own ValueError for an option that there is not, or that cannot have its value."""
    apply_flat(CompilerConfig(), dict(options))


@dataclass(frozen=True)
class Case:
    """One program with everything that decides how it is checked.

    Attributes:
        source: the text of a function ``program`` of tensors.
        inputs: its arguments.
        sizes: for each call, the values of the symbols in their shapes.
        route: "fx" checks the passes on the CPU, without a device; "graph" traces without Dynamo, captures and replays;
            "compile" goes through ``torch.compile``.
        dynamic: compile for symbolic shapes.
        functional: functionalise in-place operators before the passes (route "graph"; "compile" always does).
        expected: how many fusions there must be; None when any number will do.
        runs: False to look at the graph only.
        options: compile options.
        limits: of the judge.
    """

    source: str
    inputs: tuple[Input, ...]
    sizes: tuple[Mapping[str, int], ...] = ({}, {}, {}, {})
    route: str = "graph"
    dynamic: bool = False
    functional: bool = True
    expected: int | None = None
    runs: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        check_fields(self)
        check_route("Case.route", self.route)
        if len(self.sizes) < 2 and self.runs:
            raise ValueError("Case.sizes must name at least two calls, or nothing is ever replayed with new values.")
        check_source(self.source, len(self.inputs))
        if self.expected is not None:
            check_least("Case.expected", self.expected, 0)
        symbols = frozenset().union(*(symbols_of(spec.shape) for spec in self.inputs))
        for call, sizes in enumerate(self.sizes):
            if not symbols <= sizes.keys():
                raise ValueError(
                    f"Case.sizes must name {', '.join(sorted(symbols))} in every call; call {call} has {dict(sizes)}."
                )
        check_options(self.options)

    @classmethod
    def of(cls, program: Program, *, route: str = "graph", options: Mapping[str, Any] | None = None) -> Case:
        """The case of a drawn program."""
        expected = program.expected
        if route == "compile" and program.near_miss in ("argument mutation", "late input"):
            expected = None  # AOT makes the write functional, after which nothing stands in the way
        return cls(
            source=program.source,
            inputs=program.inputs,
            sizes=program.sizes,
            route=route,
            dynamic=program.dynamic,
            functional=program.functional,
            expected=expected,
            runs=program.runs,
            options={**options_for(program.pattern), **_drawn_options(program), **(options or {})},
            limits=Limits(overflow=program.overflow),
        )

    def function(self) -> Callable[..., Any]:
        """The program, callable."""
        return function_of(self.source)


@dataclass
class Outcome:
    """What came of a case.

    Attributes:
        failures: one sentence each; empty when all is well. The first word says which promise was broken.
        fusions: how many subgraphs were replaced.
        near_misses: the reasons that the pass report gives for subgraphs that were left alone.
        worst_ulp: the largest distance from the float64 reference of a floating-point result that differs from eager mode's.
        eager_ulp: eager mode's distance at that element.
        apart: the largest difference from eager mode's values, as in a `Verdict`.
        elements: how many numbers of results were compared.
        wrong: how many of them are wrong.
        zero_signs: how many of them are zeros with another sign than eager mode's, which are right.
        report: the pass report, when the graph was compiled.
    """

    failures: list[str] = field(default_factory=list)
    fusions: int = 0
    near_misses: tuple[str, ...] = ()
    worst_ulp: float = 0.0
    eager_ulp: float = 0.0
    apart: float = 0.0
    elements: int = 0
    wrong: int = 0
    zero_signs: int = 0
    report: PassReport | None = None

    @property
    def ok(self) -> bool:
        """Whether every promise held."""
        return not self.failures

    @property
    def kind(self) -> str:
        """Which promise was broken first, in two words; empty when none was."""
        return " ".join(self.failures[0].replace(",", "").split()[:2]) if self.failures else ""

    @property
    def runnable(self) -> bool:
        """Whether the program itself ran; a random integer, for example, may be no index."""
        return not self.failures or not self.failures[0].startswith(UNRUNNABLE)
