"""What Dynamo knows of a compilation: its inputs' names, why it compiles again, where it ended a graph."""

# ruff: noqa: SLF001 - reaching behind underscores is this module's whole purpose

from __future__ import annotations

import os
import re
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._dynamo.exc import Unsupported, UserError

_TORCH = f"{Path(torch.__file__).parent}{os.sep}"


def graph_breaks() -> Counter[str]:
    """How often each graph break happened in this process, with the line of the user's code, or a function was left out.

    Dynamo lists where it ended a graph. A function that it leaves out as a whole is in its record of the latest compilations.
    Of those before it only counts reasons, of which these are no attempts that went on: the limit, and breaks in loops.
    """
    from torch._dynamo.utils import counters, get_compilation_metrics, graph_break_reasons

    ended = (
        f"{_user_line(found.user_stack)}: {found.reason.replace('generic_jump', _JUMP, 1)}"
        for found in graph_break_reasons
    )
    failed = [one for one in get_compilation_metrics() if one.fail_type in _LEAVES_OUT and one.co_name]
    known = {one.fail_reason for one in failed}
    counted = {
        reason: times
        for reason, times in counters["unimplemented"].items()
        if _LEFT.search(reason) and reason not in known
    }
    return Counter(ended) + Counter(map(_left_out, failed)) + Counter(counted)


_JUMP = "Data-dependent branching: a condition needs the value of a tensor\n  Developer debug context: generic_jump"
_LEAVES_OUT = {Unsupported.__qualname__, UserError.__qualname__}
_LEFT = re.compile("recompile[ _]limit|graph break in loop")
_RESUMED = re.compile(r"torch_dynamo_resume_in_(.+)_at_(\d+)")


def _left_out(failed: Any) -> str:
    """The line and the reason for which Dynamo compiled nothing of a function, from its record of the compilation."""
    function, line = failed.co_name, failed.co_firstlineno
    rest = _RESUMED.fullmatch(function)
    what = f"the rest of {rest[1]} from line {rest[2]}" if rest else f"the function {function} of line {line}"
    place = f"{failed.fail_user_frame_filename}:{failed.fail_user_frame_lineno}"
    if not failed.fail_user_frame_filename or failed.fail_user_frame_filename.startswith(_TORCH):
        place = f"{failed.co_filename}:{line}"
    return f"{place}: {what} is not compiled: {failed.fail_reason}"


def _user_line(stack: Sequence[traceback.FrameSummary]) -> str:
    """``file:line`` of the innermost frame that is not torch's own, or of the innermost one."""
    frames = [frame for frame in stack if not frame.filename.startswith(_TORCH)] or stack
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "a line that torch does not know"


def recompile_reason() -> str:
    """Why Dynamo compiles the current frame again, in its own words; empty for a first compilation and outside of one."""
    from torch._dynamo.utils import get_metrics_context

    context = get_metrics_context()
    return (context.in_progress() and context._metrics.get("recompile_reason")) or ""


def compilation() -> str:
    """The number that Dynamo gives the current compilation, which `recompile_reason` begins with; empty outside of one."""
    from torch._guards import CompileContext

    return str(CompileContext.current_compile_id() or "")


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
