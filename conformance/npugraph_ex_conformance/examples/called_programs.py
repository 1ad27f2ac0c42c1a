"""What the callers of `callers.py` call: random integer programs, in eager mode and in each compiled form.

Some read or write the storage of an argument from its first element, write a value through a view of it, turn an argument in place,
or return a result twice. The compiled form is one of `torch.compile`, a kept compilation, a session, a function with nested compile
regions, or a graph as traced, perhaps saved and loaded.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._dynamo.exc import UncapturedHigherOrderOpError

import npugraph_ex
from npugraph_ex.errors import SessionError
from npugraph_ex.frontend.entry.compiler import CompiledFxArtifacts, CompiledFxGraph
from npugraph_ex.graph.memory.aliases import AliasFacts, mutated_inputs
from npugraph_ex.inference import cache_compile, session
from npugraph_ex.testing.generator.choices import Choices
from npugraph_ex.testing.generator.inputs import make_inputs, size_of
from npugraph_ex.testing.generator.program import Program, Ref, Step
from npugraph_ex.testing.generator.strategies import exact_programs
from npugraph_ex.testing.generator.variations import written_names
from npugraph_ex.testing.oracle import tracing
from npugraph_ex.testing.oracle.case import Case
from npugraph_ex_conformance.examples.written_views import with_a_written_view

_Function = Callable[..., Any]
_FROM_THE_STORAGE, _INTO_THE_STORAGE, _THROUGH_DYNAMO, _SESSION, _REGIONS, _THROUGH_A_VIEW = 35, 75, 40, 30, 40, 50
_SAVED, _KEPT, _AGAIN, _BESIDE, _ONE_MEMORY, _AS_A_PART = 30, 20, 15, 60, 80, 50
"""Chances in percent: that a program also reads an input's storage from its first element, and that it writes there, too; of
`torch.compile`, of a session in its place, or else of a function that calls the program twice as a nested compile region; that
the program writes a value through a view; that a graph is saved and loaded, and that a compilation is kept in a folder and
found there; that a result is returned twice; that an argument like a written one is read; that two arguments share memory
unknown to the graph; that what it writes in the storage is a row of the argument, which it reads from the first element after."""
_OPTIONS: tuple[Mapping[str, Any], ...] = (
    {}, {}, {"clone_output": True}, {"stable_inputs_in_place": False}, {"capture_limit": 2}, {"frozen_parameter": True},
    {"force_recapture": True},
)  # fmt: skip
_HEAD, READ, _WRITE = "head", "read", "aten.add_.Tensor"
"""The view that begins at the first element of a storage, the result that is read there, and the operator that writes there."""
_OF_NEW_MEMORY = ("aten.neg.default", "aten.bitwise_not.default", "aten.add.Tensor", "aten.clone.default")


def with_more(choices: Choices, program: Program) -> Program:
    """The program, which perhaps writes through a view and perhaps returns a result twice."""
    if READ not in program.outputs and choices.chance(_THROUGH_A_VIEW):
        program = with_a_written_view(choices, program)
    if program.functional and choices.chance(_BESIDE):
        program = _with_a_reader(program)
    return _with_a_result_twice(program) if choices.chance(_AGAIN) else program


def _with_a_reader(program: Program) -> Program:
    """The program, which in the end reads one more argument, like one that it writes: both may lie in one memory."""
    names = {*written_names(program)}
    written = next((spec for position, spec in enumerate(program.inputs) if f"x{position}" in names), None)
    if written is None:
        return program
    reader = replace(written, alias_of=None, seed=written.seed + len(program.inputs))
    step = Step("aten.bitwise_not.default", (Ref(f"x{len(program.inputs)}"),), results=("beside",))
    return replace(
        program, inputs=(*program.inputs, reader), steps=(*program.steps, step), outputs=(*program.outputs, "beside")
    )


def _with_a_result_twice(program: Program) -> Program:
    """The program, which also returns a result as an operator gives it that in eager mode returns its argument.

    Of a result that is a view of an argument, AOT makes a view for each time.
    """
    fresh = {step.results[0] for step in program.steps if step.operator in _OF_NEW_MEMORY and step.results}
    result = next((name for name in reversed(program.outputs) if name in fresh), None)
    if result is None:
        return program
    step = Step("aten.resolve_neg.default", (Ref(result),), results=("again",))
    return replace(program, steps=(*program.steps, step), outputs=(*program.outputs, "again"))


def drawn_program(choices: Choices) -> Program:
    """An integer program that perhaps also reads the storage of its first input from the first element."""
    program = exact_programs()(choices)
    first = program.inputs[0]
    if first.is_expanded or not choices.chance(_FROM_THE_STORAGE):
        return program  # an expanded argument has less memory than elements
    count = min(math.prod(size_of(dim, sizes) for dim in first.shape) for sizes in program.sizes)
    operator = choices.pick(("aten.as_strided.default", "aten.as_strided_copy.default"))
    # Of the argument, or of a value whose storage is its own: what takes that value's place must begin where it begins.
    owned = choices.pick(
        ((), (), ("aten.clone.default",), ("aten.neg.default",), ("aten.neg.default", "aten.clone.default"))
    )
    names = ["x0", *(f"own{number}" for number in range(len(owned)))]
    steps = [Step(made, (Ref(names[at]),), results=(names[at + 1],)) for at, made in enumerate(owned)]
    head = Step(operator, (Ref(names[-1]), (count,), (1,), 0), results=(_HEAD,))
    written: tuple[Step, ...] = ()
    is_view_of_an_argument = operator == "aten.as_strided.default" and not owned
    alone = all(spec.alias_of is None for spec in program.inputs)  # otherwise torch refuses a write through two views
    if is_view_of_an_argument and alone and choices.chance(_INTO_THE_STORAGE):
        written = (Step(_WRITE, (Ref(_HEAD), 1)),)
        if first.shape and choices.chance(_AS_A_PART):
            written = (
                Step("aten.slice.Tensor", (Ref("x0"), 0, 0, 1), results=("part",)),
                Step("aten.neg.default", (Ref("part"),), results=("row",)),
                Step("aten.copy_.default", (Ref("part"), Ref("row"))),
            )
    flipped = Step("aten.bitwise_not.default", (Ref(_HEAD),), results=(READ,))
    # What functionalisation makes of a view of more than its argument is not this example's question.
    return replace(
        program,
        steps=(*steps, head, *written, flipped, *program.steps),
        outputs=(*program.outputs, READ),
        functional=False,
    )


def returned_names(source: str) -> list[str]:
    """The names of the values that a program returns."""
    returned = next(node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Return))
    return [ast.unparse(value) for value in getattr(returned, "elts", [returned])]


class BothForms(NamedTuple):
    """A program's function as eager mode runs it, and compiled.

    Attributes:
        how: by what it was compiled, in words.
        eager: the function itself.
        compiled: what takes its place.
        by_dynamo: whether `torch.compile` is between the caller and the graph. A graph alone may return an argument in place
            of a view of all of it.
        in_a_session: whether the compiled one is a session, which is called in one mode.
        twins: the arguments that lie in the memory of another one, with that one's position.
    """

    how: str
    eager: Callable[..., Any]
    compiled: Callable[..., Any]
    by_dynamo: bool
    in_a_session: bool
    twins: Mapping[int, int]


def both_forms(choices: Choices, program: Case, *, turned: bool = False) -> BothForms:
    """The program as eager mode runs it, and compiled: by `torch.compile`, with an argument ``turned`` in place, or as traced."""
    function, options = program.function(), dict(choices.pick(_OPTIONS))
    twins = {position: spec.alias_of for position, spec in enumerate(program.inputs) if spec.alias_of is not None}
    with_options = f" with the options {options}" if options else ""
    torch.compiler.reset()
    if choices.chance(_THROUGH_DYNAMO):
        if turned and not program.inputs[0].is_expanded:
            function = _turning(function)
        compiled = torch.compile(function, backend="npugraph_ex", options=options, fullgraph=True)
        if choices.chance(_KEPT):
            compiled = _kept_by_another_process(function, program, options)
            return BothForms(f"cache_compile{with_options}", function, compiled, True, False, twins)
        session_instead, in_a_session, how = choices.chance(_SESSION), False, "torch.compile"
        if not session_instead and not twins and choices.chance(_REGIONS):
            regions = _in_regions(function, program, options)
            how = how if regions is None else "torch.compile, called twice as a nested compile region"
            function, compiled = regions or (function, compiled)
        if session_instead:
            with suppress(SessionError), torch.no_grad():  # it refuses programs that return views of their arguments
                examples = make_inputs(program.inputs, sizes=program.sizes[0])
                compiled = session(function, examples, dynamic=program.dynamic or None, options=options)
                in_a_session, how = True, "session"
        return BothForms(how + with_options, function, compiled, True, in_a_session, twins)
    traced = tracing.trace(
        function, program.inputs, program.sizes[0], dynamic=program.dynamic, functional=program.functional
    )
    if program.functional and choices.chance(_ONE_MEMORY):
        twins |= _readers_of_written_memory(traced.graph, program, twins)
    captured = npugraph_ex.compile_fx(tracing.copy_of(traced), None, options)
    saved = choices.chance(_SAVED)
    if saved:
        captured = _loaded(captured)
    # A trace makes a copy of a dropout in eval mode, which in eager mode is its argument itself.
    copied = "aten.dropout.default" in program.source
    eager = traced if program.functional or copied else function
    how = f"compile_fx{', saved and loaded' if saved else ''}{with_options}"
    return BothForms(how, eager, captured, False, False, twins)


def _turning(function: _Function) -> _Function:
    """A function that first turns its first argument in place, onto itself, and writes and returns it, under another name."""

    def turning(first: torch.Tensor, *others: torch.Tensor) -> Any:
        same = first.to(first.dtype)
        same.transpose_(-1, -1)
        same.bitwise_not_()
        results = function(first, *others)
        return (*results, same) if isinstance(results, (tuple, list)) else (results, same)

    return turning


def _kept_by_another_process(function: _Function, program: Case, options: Mapping[str, Any]) -> _Function:
    """The function as `cache_compile` finds it in a folder; compiled anew where it cannot be kept."""
    with TemporaryDirectory() as folder:
        keep = partial(cache_compile, options=options, cache_dir=folder, dynamic=program.dynamic)
        examples = make_inputs(program.inputs, sizes=program.sizes[0])
        keep(function)(*examples)
        torch.compiler.reset()
        found: _Function = keep(function)
        found(*make_inputs(program.inputs, sizes=program.sizes[0]))  # which reads the file
    return found


def _loaded(captured: _Function) -> _Function:
    """The graph as another process loads it; the graph itself if it cannot be saved."""
    text = captured.get_code(guarded=True) if isinstance(captured, CompiledFxGraph) else None
    return captured if text is None else CompiledFxGraph.load_artifacts(CompiledFxArtifacts(py_code=text))


def _in_regions(function: _Function, program: Case, options: dict[str, Any]) -> tuple[_Function, _Function] | None:
    """A function that calls the program twice as one nested compile region, and it compiled.

    None if torch refuses the region, because an argument or a result shares memory with another.
    """

    @torch.compiler.nested_compile_region
    def region(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results = function(*inputs)
        return tuple(results) if isinstance(results, (tuple, list)) else (results,)

    def twice(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (*region(*inputs), *region(*inputs))

    compiled = torch.compile(twice, backend="npugraph_ex", options=options, fullgraph=True)
    with suppress(UncapturedHigherOrderOpError), torch.no_grad():
        compiled(*make_inputs(program.inputs, sizes=program.sizes[0]))
        return twice, compiled
    return None


def _readers_of_written_memory(graph: fx.Graph, program: Case, twins: Mapping[int, int]) -> dict[int, int]:
    """An argument that is only read, and one like it that is written at the end, in whose memory the caller puts the first.

    Nobody knew when the graph was traced. It reads its arguments before it writes any, so all values are certain.
    """
    written = mutated_inputs(graph, AliasFacts(graph))
    alone = [position for position in range(len(program.inputs)) if position not in {*twins, *twins.values()}]
    for reader in sorted(set(alone) - written):
        for writer in sorted(written.intersection(alone)):
            if replace(program.inputs[reader], seed=0) == replace(program.inputs[writer], seed=0):
                return {reader: writer}
    return {}
