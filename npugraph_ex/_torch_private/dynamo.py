"""What Dynamo knows of a compilation: its inputs' names, why it compiles again, where it ended a graph."""

# ruff: noqa: SLF001 - reaching behind underscores is this module's whole purpose

from __future__ import annotations

import os
import re
import sysconfig
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._dynamo.exc import TorchRuntimeError, Unsupported, UserError

_HERE, _TORCH = Path(__file__).parents[1], Path(torch.__file__).parent
_LIBRARIES = tuple(
    f"{folder}{os.sep}" for folder in (_TORCH, _TORCH.with_name("torch_npu"), _HERE, _HERE.with_name("npu_emulator"))
)
_Line = tuple[str | None, int | None]
_PYTHON = f"{sysconfig.get_path('stdlib')}{os.sep}"
_FRAME = re.compile(r"Line: (\d+), Name: .*, Filename: (.*)")


def is_compiled(model: object) -> bool:
    """Whether a module or function is the result of ``torch.compile``, or a module whose ``compile()`` was called.

    So is a module whose ``forward`` is. Dynamo compiles what is inside of them anew, and leaves the earlier backend and its
    options out.
    """
    wrapped = any(
        hasattr(one, "_torchdynamo_orig_callable") and not getattr(one, "_torchdynamo_disable", False)
        for one in (model, getattr(model, "forward", None))
    )
    return wrapped or getattr(model, "_compiled_call_impl", None) is not None


def graph_breaks() -> Counter[str]:
    """How often each graph break happened in this process, with the line of the user's code, or a function was left out.

    Dynamo lists where it ended a graph. A function that it leaves out as a whole is in its record of the latest compilations.
    Of those before it only counts reasons, of which these are no attempts that went on: the limit, and breaks in loops.
    """
    from torch._dynamo.utils import counters, get_compilation_metrics, graph_break_reasons

    compilations = get_compilation_metrics()
    callers = {(one.co_filename, one.co_name): _callers(one) for one in reversed(compilations)}
    ended = (
        f"{_user_line(found.user_stack, callers)}: {found.reason.replace('generic_jump', _JUMP, 1)}"
        for found in graph_break_reasons
    )
    failed = [
        (one, _named(one, compilations[:number]))
        for number, one in enumerate(compilations)
        if one.fail_type in _LEAVES_OUT
    ]
    known = {one.fail_reason for one, named in failed if named.co_name}
    counted = {
        reason: times
        for reason, times in counters["unimplemented"].items()
        if _LEFT.search(reason) and reason not in known
    }
    return Counter(ended) + Counter(_left_out(*pair) for pair in failed if pair[1].co_name) + Counter(counted)


_JUMP = "Data-dependent branching: a condition needs the value of a tensor\n  Developer debug context: generic_jump"
_LEAVES_OUT = {Unsupported.__qualname__, UserError.__qualname__}
_LEFT = re.compile("recompile[ _]limit|graph break in loop")
_RESUMED = re.compile(r"torch_dynamo_resume_in_(.+)_at_(\d+)")


def _named(failed: Any, before: Sequence[Any]) -> Any:
    """The record of a compilation that names its function: at the limit it is the latest before with the number of the function."""
    number = str(failed.compile_id).partition("/")[0]
    same = (one for one in reversed(before) if str(one.compile_id).partition("/")[0] == number and one.co_name)
    return failed if failed.co_name else next(same, failed)


def _left_out(failed: Any, named: Any) -> str:
    """The line and the reason for which Dynamo compiled nothing of a function, from its record of the compilation."""
    function, line = named.co_name, named.co_firstlineno
    rest = _RESUMED.fullmatch(function)
    what = f"the rest of {rest[1]} from line {rest[2]}" if rest else f"the function {function} of line {line}"
    failed_at = (failed.fail_user_frame_filename, failed.fail_user_frame_lineno)
    place = _place([failed_at, (named.co_filename, line)], _callers(named), called=(named.co_filename, line))
    return f"{place}: {what} is not compiled: {failed.fail_reason}"


def _callers(compilation: Any) -> list[_Line]:
    """The file and line of frames above a function that Dynamo compiled, innermost first; its record leaves out the nearest two."""
    frames = map(_FRAME.fullmatch, reversed(getattr(compilation, "stack_trace", None) or []))
    return [(frame[2], int(frame[1])) for frame in frames if frame]


def _place(inside: Sequence[_Line], above: Sequence[_Line], *, called: _Line) -> str:
    """``file:line`` of the first line that is the user's: inside a function, or above it, from where it is called."""
    own = next((line for line in inside if _is_users(line[0])), None)
    caller = next((line for line in above if _is_users(line[0])), None)
    file, line = own or caller or called
    return f"{file}:{line}" if own or not caller else f"{file}:{line} (calls {called[0]}:{called[1]})"


def _is_users(file: str | None) -> bool:
    """Whether a file is neither torch's, torch_npu's, Python's nor this library's."""
    if not file or file.startswith(("<", *_LIBRARIES)):
        return False
    return not file.startswith(_PYTHON) or f"{os.sep}site-packages{os.sep}" in file


def _user_line(
    stack: Sequence[traceback.FrameSummary], callers: Mapping[tuple[str | None, str | None], list[_Line]]
) -> str:
    """Where the innermost frame of the user's is: in the function that was compiled, or above it."""
    if not stack:
        return "a line that torch does not know"
    inside = [(frame.filename, frame.lineno) for frame in reversed(stack)]
    return _place(inside, callers.get((stack[0].filename, stack[0].name), []), called=inside[0])


def recompile_reason() -> str:
    """Why Dynamo compiles the current frame again, in its own words; empty for a first compilation and outside of one."""
    from torch._dynamo.utils import get_metrics_context

    context = get_metrics_context()
    return (context.in_progress() and context._metrics.get("recompile_reason")) or ""


def compilation() -> str:
    """The number that Dynamo gives the current compilation, which `recompile_reason` begins with; empty outside of one."""
    from torch._guards import CompileContext

    return str(CompileContext.current_compile_id() or "")


class Frame(NamedTuple):
    """What Dynamo compiles a graph from.

    Attributes:
        code: the function's.
        compiler: Dynamo's object for the backend; each `torch.compile` has its own.
    """

    code: CodeType
    compiler: object


def frame_of(gm: fx.GraphModule) -> Frame | None:
    """The frame whose only graph this is; None if Dynamo does not compile one now, or another backend has split its graph."""
    from torch._dynamo.symbolic_convert import tls

    output = getattr(getattr(tls, "current_tx", None), "output", None)
    return Frame(output.root_tx.f_code, output.compiler_fn) if output and output.graph is gm.graph else None


def _with_attributes(text: str) -> str:
    """A name of Dynamo's as a program has it: Dynamo writes an attribute of a module as an entry of its dictionary."""
    return re.sub(r"\._(?:parameters|buffers|modules)\['(\w+)'\]", r".\1", text)


def dynamo_input_names(gm: fx.GraphModule) -> list[str]:
    """The user's name of each input of a Dynamo graph, such as ``L['x']`` or ``L['self'].weight``, by position."""
    names = []
    for node in gm.graph.find_nodes(op="placeholder"):
        source = getattr(node.meta.get("grapharg"), "source", None)
        name = getattr(source, "name", None)
        text = str(name() if callable(name) else name or node.target)
        names.append(_with_attributes(text))
    return names


def dynamo_input_roots(gm: fx.GraphModule) -> list[str]:
    """Where Dynamo's code takes each input of a graph from, by position.

    It is the name of a local variable, "" for a global, or the kind of a source that is neither, such as a random number.
    """
    from torch._dynamo.source import ConstantSource, GlobalSource, GlobalWeakRefSource, LocalSource

    roots = []
    for node in gm.graph.find_nodes(op="placeholder"):
        source: Any = getattr(node.meta.get("grapharg"), "source", None)
        while getattr(source, "base", None) is not None:
            source = source.base
        if isinstance(source, LocalSource):
            roots.append(source.local_name)
        else:
            known = isinstance(source, (GlobalSource, GlobalWeakRefSource, ConstantSource))
            roots.append("" if known else type(source).__name__)
    return roots


def failed_on_its_inputs(error: Exception) -> bool:
    """Whether the program itself failed while Dynamo traced it: an operator refused its operands, or its code raised."""
    return isinstance(error, TorchRuntimeError)
