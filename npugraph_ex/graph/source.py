"""The line of the user's code that a node comes from."""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path

import torch
from torch import fx

_OWN = f"{Path(__file__).parents[1]}{os.sep}"
_HIGHER_ORDER = f"{Path(torch.__file__).parent / '_higher_order_ops'}{os.sep}"
"""In the stack of `torch.cond` before torch 2.11."""
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)(?:.*\n(?!\s*File ")\s*(?P<code>.*))?')
_PASSES_ALL_ON = re.compile(r"\*\w+, \*\*\w+\)")
"""The call by which a decorator's function calls the one that the user wrote."""


def source_line(node: fx.Node) -> str:
    """``file:line`` of the user code of ``node``; empty if the graph does not know it."""
    return _lines_in(node.meta.get("stack_trace") or "")[-1]


def compiled_line(node: fx.Node) -> str:
    """``file:line`` of the function that was compiled, from where the code of ``node`` is reached; empty as above.

    What a decorator puts around it is passed over.
    """
    trace = node.meta.get("stack_trace") or ""
    return next((f"{file}:{line}" for file, line, code in _frames_in(trace) if not _PASSES_ALL_ON.search(code)), "")


@functools.lru_cache(maxsize=4096)
def _lines_in(trace: str) -> tuple[str, ...]:
    """The user's lines in a stack trace, which nodes of one line share; an empty one where there is none."""
    return tuple(f"{file}:{line}" for file, line, _ in _frames_in(trace)) or ("",)


def _frames_in(trace: str) -> list[tuple[str, str, str]]:
    """The user's frames: file, line and what is written there."""
    frames = _FRAME.findall(trace)
    others = [frame for frame in frames if not frame[0].startswith(_OWN)]
    return [frame for frame in others if not frame[0].startswith(_HIGHER_ORDER)] or others
