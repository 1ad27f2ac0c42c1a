"""What a pass is, and what its context holds. `pipeline` runs the passes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import CodeType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

from torch import fx

from npugraph_ex.config.options import Options
from npugraph_ex.errors import GraphVerificationError
from npugraph_ex.graph.effects import remove_dead_nodes
from npugraph_ex.report.builder import ReportBuilder

if TYPE_CHECKING:
    from npugraph_ex.passes.numerics import NumericCheck


@dataclass(frozen=True)
class PassContext:
    """Everything that a pass may read.

    Attributes:
        options: the validated compile options.
        example_inputs: the graph's inputs, fake or real, in the order of its placeholders.
        report: the record of what each pass did.
        config: what a user's pass receives as its third argument; by default the options.
        vector_cores: the device's number of vector cores; None if it is unknown.
        numerics: compares values with those of the first graph; None without the option ``check_numerics``.
        result_views: for each result, whether it was a view before the first pass.
        values: the placeholders' values in the current call; empty if unknown.
        price: the modelled microseconds of a node that starts work, for `auto_streams`; None counts the start alone.
    """

    options: Options
    example_inputs: Sequence[Any]
    report: ReportBuilder = field(default_factory=ReportBuilder)
    config: object = None
    vector_cores: int | None = None
    numerics: NumericCheck | None = None
    result_views: tuple[bool, ...] = ()
    values: Sequence[Any] = ()
    price: Callable[[fx.Node], float] | None = None


@dataclass(frozen=True)
class Pass:
    """A named rewrite of a graph, in place.

    A pass edits ``gm.graph`` and returns nothing. The pipeline, not the pass, dumps, times, lints, recompiles,
    refreshes metadata and verifies.

    Attributes:
        name: unique in a pipeline; appears in reports, dumps and errors.
        run: the rewrite.
        option: the name of the option that switches it on; None if it always runs.
        recoverable: whether the graph is still right without it. Then the pipeline undoes and reports a failure instead of
            raising. Never true of a user's pass, because the user must see the failure.
        by_user: whether it runs a user's function, which may call the module or print its code.
        replaces_collectives: whether it may replace collectives by others. The user guarantees that all processes do the
            same.
    """

    name: str
    run: Callable[[fx.GraphModule, PassContext], None]
    option: str | None = None
    recoverable: bool = True
    by_user: bool = False
    replaces_collectives: bool = False

    def enabled(self, context: PassContext) -> bool:
        """Whether the options switch this pass on."""
        return self.option is None or getattr(context.options, self.option) not in (None, False, "off")

    def named(self, context: PassContext) -> str:
        """The name of this pass in errors; for a user's pass also the function with its file and line."""
        if not self.by_user:
            return self.name
        return f"{self.name} ({described(getattr(context.options, self.name))})"


def described(function: object) -> str:
    """A callable's name and its place in the source, for a message.

    For a partial, a method or a decorated function this is the inner function; for an object, its `__call__`.
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
    """The pass that calls the user's function in ``option``: ``fn(gm, example_inputs, config)``."""

    def run(gm: fx.GraphModule, context: PassContext) -> None:
        function = getattr(context.options, option)
        returned = function(gm, context.example_inputs, context.config)
        if isinstance(returned, (fx.GraphModule, fx.Graph)) and returned is not gm and returned is not gm.graph:
            raise GraphVerificationError(
                f"{option} returned another {type(returned).__name__}, which is not used: a pass edits the graph that it gets. "
                "Edit gm.graph, or assign the new graph to it (gm.graph = new.graph), and return nothing."
            )
        with suppress(RuntimeError):  # the graph is broken, which its verification tells better
            remove_dead_nodes(gm.graph)  # what the function left unused would be another user of a match's values

    return Pass(option, run, option=option, recoverable=False, by_user=True, replaces_collectives=True)
