"""Examples about saved graphs: a graph that was saved and loaded computes what its function does, and refuses everything else.

A graph is traced from some of the pieces of `saved_pieces.py`: constants, numbers that JSON lacks,
arithmetic of symbolic sizes, copies that are views at one row. The loaded graph is called with inputs that fit, with one row, and
with inputs of which one thing is wrong. A graph is saved unless a piece forbids it. A file that was cut off, changed, or written
by somebody else raises before anything of it runs.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

import npugraph_ex
from npugraph_ex import CompilerConfig
from npugraph_ex.errors import SavedGraphError
from npugraph_ex.frontend.entry.backend import get_npu_backend
from npugraph_ex.frontend.entry.compiler import CompiledFxArtifacts, CompiledFxGraph
from npugraph_ex.graph.memory.aliases import output_values
from npugraph_ex.saving import text as saved_text
from npugraph_ex.testing.oracle.judge import same_values
from npugraph_ex.testing.oracle.observation import observe, visible_difference
from npugraph_ex.testing.oracle.tracing import copy_of
from npugraph_ex_conformance.examples.saved_pieces import PIECES, WIDTH, Held, Piece

_Function = Callable[..., Any]

_TRACED, _CALLED = 6, (6, 8, 1, 5, 13)
"""The rows at the trace, and the rows of the calls."""
_NUMBERS = (7, 9, 11)
_EAGER, _SYMBOLIC, _DYNAMO, _SHARED, _PART, _FOREIGN_CODE = 40, 70, 50, 15, 40, 15
"""Chances in percent: of the option `force_eager`, of symbolic rows, that Dynamo traces, whose guards the caller drops; that
the tensors of another trace lie in one memory, that such a trace is a part of a longer graph, and that it calls a function
of this process."""


_LONGER: tuple[tuple[_Function, _Function], ...] = (
    (lambda size: size - 3, lambda rows: rows + 3),
    (lambda size: 20 - size, lambda rows: 20 - rows),
    (lambda size: size // 2 - 2, lambda rows: 2 * rows + 4),
    (lambda size: size % 16, lambda rows: rows + 16),
    (lambda size: -(-size // 2), lambda rows: 2 * rows),
)
"""The rows of values in a longer graph by the size of its input, and the size by the rows."""


def saved_graph_example(seed: int) -> str:
    """What is wrong with the example that ``seed`` stands for; empty when nothing is."""
    draw = random.Random(seed)
    symbolic, dynamo = draw.randrange(100) < _SYMBOLIC, draw.randrange(100) < _DYNAMO
    names = draw.sample([name for name, piece in PIECES.items() if piece.dynamo or not dynamo], draw.randint(1, 3))
    what = f"{', '.join(names)}, {'symbolic' if symbolic else 'fixed'} rows, traced by {'Dynamo' if dynamo else 'make_fx'}: "
    try:
        with torch.no_grad():
            wrong = next(_wrong(draw, [PIECES[name] for name in names], dynamo=dynamo, symbolic=symbolic), "")
    except Exception as error:  # noqa: BLE001 - whatever a fault makes the library raise is what was found
        wrong = f"raised {type(error).__name__}: {error}"
    return wrong and what + wrong


class _CompiledProgram(NamedTuple):
    """A compiled graph.

    Attributes:
        made: what was compiled.
        inputs: the graph's inputs, of two tensors and a number.
        at_one: what it should compute for one row, of the same.
    """

    made: CompiledFxGraph
    inputs: Callable[..., list[Any]]
    at_one: _Function


def _wrong(draw: random.Random, pieces: Sequence[Piece], *, dynamo: bool, symbolic: bool) -> Iterator[str]:
    held, eager, fixed = Held(draw), draw.randrange(100) < _EAGER, draw.choice(_NUMBERS)
    of_width = draw.randrange(2) == 0  # a constant makes the columns a number

    def function(x: torch.Tensor, y: torch.Tensor, number: int) -> list[Any]:
        number = number if symbolic and not dynamo else fixed
        total = x + y + held.held if of_width else x + y
        return [total, *(result for piece in pieces for result in piece.run(held, x, y, number))]

    given, shared = _inputs(draw, _TRACED), not dynamo and draw.randrange(100) < _SHARED
    if shared:
        given[1] = given[0][:]
    part = symbolic and not (dynamo or shared) and draw.randrange(100) < _PART
    foreign = not (symbolic or dynamo) and draw.randrange(100) < _FOREIGN_CODE
    if foreign:
        traced = _by_make_fx(function, given, eager=eager, symbolic=False, foreign=True)
    elif part:
        traced = _as_a_part(function, given, *draw.choice(_LONGER), eager=eager)
    else:
        traced = (_by_dynamo if dynamo else _by_make_fx)(function, given, eager=eager, symbolic=symbolic)
    unguarded = dynamo and symbolic
    text = traced.made.get_code(guarded=not unguarded)
    can = not foreign and all(
        (piece.saved or (eager and piece.eager)) and not (shared and piece.writes) for piece in pieces
    )
    at_one = all(piece.at_one for piece in pieces)
    if text is None:
        if can and all(piece.whole or not dynamo for piece in pieces) and (at_one or not unguarded):
            yield f"it is not saved, because {traced.made.unsaved}"
        return
    if not can:
        yield "it is saved, and cannot be"
    loaded = CompiledFxGraph.load_artifacts(CompiledFxArtifacts(py_code=text))
    for rows, width in (*((rows, WIDTH) for rows in _CALLED), (_TRACED, WIDTH + 1)):
        given = _inputs(draw, rows, width)
        many = (
            symbolic
            and not part
            and all(piece.rows for piece in pieces)
            and (rows > 1 or (at_one and (dynamo or of_width)))
        )
        sure = width == WIDTH and (rows == _TRACED or many)
        yield from _called(loaded, traced, traced.at_one if rows == 1 else function, given, sure=sure)
    right = traced.inputs(*_inputs(draw, _TRACED))
    yield from _not_refused(loaded, right, text, draw, symbolic=symbolic)


def _not_refused(
    loaded: CompiledFxGraph, right: Sequence[Any], text: str, draw: random.Random, *, symbolic: bool
) -> Iterator[str]:
    """What should raise, and does not."""
    for change, inputs, said in _unfit(right, draw, symbolic=symbolic):
        yield from _refused(change, partial(loaded, *inputs), said)
    for change, spelt in _damaged(text, draw):
        artifacts = CompiledFxArtifacts(py_code=spelt)
        yield from _refused(change, partial(CompiledFxGraph.load_artifacts, artifacts))


def _inputs(draw: random.Random, rows: int, width: int = WIDTH) -> list[Any]:
    """Two tensors of small whole numbers, and a number that is no size."""
    values = [torch.tensor(draw.choices(range(-9, 10), k=rows * width), dtype=torch.float32) for _ in range(2)]
    tensors = [value.view(rows, width).to("npu") for value in values]
    if rows == 1:  # of a single row the stride says nothing
        tensors[0] = torch.cat([tensors[0], tensors[0]], 1)[:, :width]
    return [*tensors, draw.choice(_NUMBERS)]


def _by_make_fx(
    function: _Function, given: Sequence[Any], *, eager: bool, symbolic: bool, foreign: bool = False
) -> _CompiledProgram:
    """With all sizes and the number symbolic, or none. At one row the traced graph counts, which has no `contiguous`."""
    if symbolic:
        graph = make_fx(function, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*given)
        made = _compiled(copy_of(graph), given, {"force_eager": eager})
        return _CompiledProgram(made, lambda *inputs: list(inputs), graph)
    graph = make_fx(lambda x, y: function(x, y, 0), tracing_mode="fake", _allow_non_fake_inputs=True)(*given[:2])
    compiled = copy_of(graph)
    if foreign:
        compiled.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)[0].target = _added
    made = _compiled(compiled, given[:2], {"force_eager": eager, "post_grad_custom_pre_pass": _no_pass})
    return _CompiledProgram(made, lambda x, y, _: [x, y], lambda x, y, _: graph(x, y))


def _compiled(graph: fx.GraphModule, given: Sequence[Any], options: dict[str, Any]) -> CompiledFxGraph:
    made = npugraph_ex.compile_fx(graph, given, options)
    assert isinstance(made, CompiledFxGraph)
    return made


def _added(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A function that no other process has, as far as a file can say."""
    return x + y


def _no_pass(gm: fx.GraphModule, example_inputs: object, config: object) -> None:
    """A user's pass, which is over before the graph is saved."""


def _as_a_part(
    function: _Function, given: Sequence[Any], rows: _Function, size: _Function, *, eager: bool
) -> _CompiledProgram:
    """With values in the middle of a longer graph as inputs, as where a client divides graphs; a size is an input, too."""

    def front(x: torch.Tensor, number: int) -> tuple[Any, ...]:
        return tuple(x.new_ones(rows(x.shape[0]), WIDTH) for _ in range(2))

    example = torch.ones(size(_TRACED), device="npu")
    longer = make_fx(front, tracing_mode="symbolic", _allow_non_fake_inputs=True)(example, given[2]).graph
    x, number = (node.meta["val"] for node in longer.find_nodes(op="placeholder"))
    inputs = [x.shape[0], *(node.meta["val"] for node in output_values(longer)), number]
    graph = make_fx(lambda _, x, y, number: function(x, y, number), _allow_non_fake_inputs=True)(*inputs)
    made = _compiled(copy_of(graph), inputs, {"force_eager": eager})
    return _CompiledProgram(
        made, lambda x, y, number: [size(x.shape[0]), x, y, number], lambda x, y, number: graph(size(1), x, y, number)
    )


def _by_dynamo(function: _Function, given: Sequence[Any], *, eager: bool, symbolic: bool) -> _CompiledProgram:
    """As a client that drops torch's guards, with symbolic rows, or none."""
    config, made, graphs = CompilerConfig(), list[CompiledFxGraph](), list[tuple[fx.GraphModule, Sequence[Any]]]()
    config.debug.run_eagerly = eager
    compiler = get_npu_backend(compiler_config=config, on_compiled=made.append)

    def backend(gm: fx.GraphModule, examples: Sequence[Any]) -> _Function:
        graphs.append((gm, examples))
        compiled: _Function = compiler(gm, examples)
        return compiled

    for value in given[:2] if symbolic else ():
        torch._dynamo.mark_dynamic(value, 0)
    torch.compiler.reset()
    torch.compile(function, backend=backend, fullgraph=True, dynamic=None if symbolic else False)(*given)
    ((gm, examples),) = graphs
    names = [node.name for node in gm.graph.find_nodes(op="placeholder")]

    def inputs(x: torch.Tensor, y: torch.Tensor, _: int) -> list[Any]:
        known = {"l_x_": x, "l_y_": y}
        rest = [x.shape[0] if isinstance(value, torch.SymInt) else value for value in examples]
        return [known.get(name.lower(), value) for name, value in zip(names, rest, strict=True)]

    return _CompiledProgram(made[0], inputs, function)


def _called(
    loaded: _Function, traced: _CompiledProgram, meant: _Function, given: Sequence[Any], *, sure: bool
) -> Iterator[str]:
    """A call that does what is meant, or, unless it is sure to fit, is refused."""
    what = f"called with {list(given[0].shape)} and {given[2]}"
    own = [value.clone() if isinstance(value, torch.Tensor) else value for value in given]
    try:
        expected = observe(own[:2], meant(*own))
    except (RuntimeError, TypeError):
        expected = None
    try:
        actual = observe(given[:2], loaded(*traced.inputs(*given)))
    except SavedGraphError as error:
        yield from [f"{what}, it refuses: {error}"] * sure
        return
    if expected is None:
        yield f"{what}, it does not raise as the function does"
        return
    different = visible_difference(expected, actual, kept_as=False)
    pairs = zip((*expected.outputs, *expected.inputs), (*actual.outputs, *actual.inputs), strict=True)
    if different or not all(same_values(*pair) for pair in pairs):
        yield f"{what}, it gives something else: {different or 'other values'}"


def _unfit(right: Sequence[Any], draw: random.Random, *, symbolic: bool) -> Iterator[tuple[str, list[Any], str]]:
    """Inputs of which one thing is wrong: what, the inputs, and what the error must say of them."""
    yield "with an input fewer", list(right[:-1]), str(len(right) - 1)
    yield "with an input more", [*right, right[-1]], str(len(right) + 1)
    places = [place for place, value in enumerate(right) if isinstance(value, torch.Tensor)]
    place = draw.choice([place for place in places if right[place].shape == (_TRACED, WIDTH)])
    tensor = right[place]
    for what, other in (
        ("of another type", tensor.to(torch.float16)),
        ("on the host", tensor.cpu()),
        ("with one more dimension", tensor[None]),
        ("with columns in a row", tensor.t().contiguous().t()),
        ("with more rows than the other", torch.cat([tensor, tensor])),
        ("that is a number", 3),
    ):
        said = str(list(other.shape)) if isinstance(other, torch.Tensor) else "3"
        yield f"with a tensor {what}", [*right[:place], other, *right[place + 1 :]], said
    if not symbolic:
        more = [torch.cat([value, value]) if value.shape == tensor.shape else value for value in right]
        yield "with other rows", more, f"[{2 * _TRACED}, {WIDTH}]"
    for number in {0, len(right) - 1}.difference(places):
        wrong: list[Any] = [*right]
        wrong[number] = 2.5
        yield "with a broken number", wrong, "2.5"


_HOSTILE = (
    "__builtins__ == 1", "__import__('os')", "print(L)", "L.pop('t0') == 1", "L['t0'].cpu()", "(lambda: 1)()", "[1 for _ in L]",
    "L['t0'].size().__len__() == 2",
)  # fmt: skip
_FOREIGN: tuple[Mapping[str, Any], ...] = (
    {"function": ["builtins", "eval"]}, {"function": ["torch", "load"]}, {"function": ["os", "system"]},
    {"operator": ["aten", "no_operator", "default"]},
)  # fmt: skip


def _damaged(text: str, draw: random.Random) -> Iterator[tuple[str, str]]:
    """Texts that are no saved graph any more, each with what was done to it."""
    place = draw.randrange(len(text))
    yield "cut off", text[:place]
    yield "changed", text[:place] + chr(ord(text[place]) ^ 1) + text[place + 1 :]
    yield "of another format", text.replace(f" {saved_text.FORMAT} ", f" {saved_text.FORMAT + 1} ", 1)
    data, source = saved_text.parse(text)
    for name in ("torch", "npugraph_ex"):
        yield f"of another {name}", saved_text.write({**data, name: "0.1"}, source)
    hostile = draw.choice(_HOSTILE)
    yield f"with the condition {hostile}", saved_text.write({**data, "condition": hostile}, source)
    nodes = json.loads(json.dumps(data["nodes"]))
    called = next(node for node in nodes if node["op"] == "call_function")
    called["target"] = dict(draw.choice(_FOREIGN))
    yield f"that calls {called['target']}", saved_text.write({**data, "nodes": nodes}, source)


def _refused(change: str, action: Callable[[], object], said: str = "") -> Iterator[str]:
    """What is done must raise, and say what came; of what somebody else wrote any error will do."""
    try:
        action()
    except SavedGraphError as error:
        if said not in str(error):
            yield f"{change}, it refuses without {said}: {error}"
    except (TypeError, ValueError) as error:
        if said:
            yield f"{change}, it raises {type(error).__name__}: {error}"
    else:
        yield f"{change}, it is not refused"
