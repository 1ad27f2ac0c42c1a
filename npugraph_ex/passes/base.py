"""What a pass is, and what it is given. Not what any pass does, and not how passes are run."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import CodeType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

from torch import fx

from npugraph_ex.config.options import Options
from npugraph_ex.errors import GraphVerificationError
from npugraph_ex.report.passes import ReportBuilder

if TYPE_CHECKING:
    from npugraph_ex.passes.numerics import NumericCheck


@dataclass(frozen=True)
class PassContext:
    """What every pass may ask for.

    Attributes:
        options: the validated compile options.
        example_inputs: the graph's inputs, fake or real, in the order of its placeholders.
        report: where a pass says what it did.
        config: what a user's pass receives as its third argument; the options when the caller gave nothing else.
        vector_cores: how many the device has; None where there is none, or where nobody asked.
        numerics: compares values with those of the first graph; None without the option ``check_numerics``.
        result_views: of each result whether it was a view to autograd before the first pass.
    """

    options: Options
    example_inputs: Sequence[Any]
    report: ReportBuilder = field(default_factory=ReportBuilder)
    config: object = None
    vector_cores: int | None = None
    numerics: NumericCheck | None = None
    result_views: tuple[bool, ...] = ()


@dataclass(frozen=True)
class Pass:
    """A named rewrite of a graph, in place.

    A pass edits ``gm.graph`` and returns nothing. The pipeline, not the pass, dumps, times, lints, recompiles,
    refreshes metadata and verifies.

    Attributes:
        name: unique in a pipeline; appears in reports, dumps and errors.
        run: the rewrite.
        option: the name of the option that switches it on; None when it always runs.
        recoverable: whether the graph is still right without it, so that a failure is undone and reported instead
            of raised. Never true of a user's pass: the user must learn of it.
        by_user: whether the user's own function runs, which may call the module or print its code.
        replaces_collectives: whether it may put other collectives in the place of some, on the user's word that all
            processes do the same.
    """

    name: str
    run: Callable[[fx.GraphModule, PassContext], None]
    option: str | None = None
    recoverable: bool = True
    by_user: bool = False
    replaces_collectives: bool = False

    def enabled(self, context: PassContext) -> bool:
        """Whether the options switch this pass on."""
        return self.option is None or getattr(context.options, self.option) not in {None, False, "off"}

    def named(self, context: PassContext) -> str:
        """What errors call this pass: its name and, of a user's, the function with its file and line."""
        if not self.by_user:
            return self.name
        return f"{self.name} ({described(getattr(context.options, self.name))})"


def described(function: object) -> str:
    """A callable as its author knows it: what it is called, and where it is written.

    Of a partial, a method and a decorated function it is the function inside; of an object, what calling it runs.
    """
    while isinstance(function, functools.partial):
        function = function.func
    if not isinstance(function, (FunctionType, MethodType)) and isinstance(
        call := type(function).__call__, FunctionType
    ):
        function = call
    function = inspect.unwrap(function) if callable(function) else function
    code = getattr(function, "__code__", None)
    name = getattr(function, "__qualname__", repr(function))
    return f"{name}, {code.co_filename}:{code.co_firstlineno}" if isinstance(code, CodeType) else name


def user_pass(option: str) -> Pass:
    """The pass that calls the function which the user put into ``option``: ``fn(gm, example_inputs, config)``."""

    def run(gm: fx.GraphModule, context: PassContext) -> None:
        function = getattr(context.options, option)
        returned = function(gm, context.example_inputs, context.config)
        if isinstance(returned, (fx.GraphModule, fx.Graph)) and returned is not gm and returned is not gm.graph:
            raise GraphVerificationError(
                f"{option} returned another {type(returned).__name__}, which is not used: a pass edits the graph that it gets. "
                "Edit gm.graph, or assign the new graph to it (gm.graph = new.graph), and return nothing."
            )

    return Pass(option, run, option=option, recoverable=False, by_user=True, replaces_collectives=True)
