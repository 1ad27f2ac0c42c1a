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
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')


def source_line(node: fx.Node) -> str:
    """``file:line`` of the user code of ``node``; empty if the graph does not know it."""
    return _lines_in(node.meta.get("stack_trace") or "")[-1]


def compiled_line(node: fx.Node) -> str:
    """``file:line`` of the function that was compiled, from where the code of ``node`` is reached; empty as above."""
    return _lines_in(node.meta.get("stack_trace") or "")[0]


@functools.lru_cache(maxsize=4096)
def _lines_in(trace: str) -> tuple[str, ...]:
    """The user's lines in a stack trace, which nodes of one line share; an empty one where there is none."""
    frames = _FRAME.findall(trace)
    others = [frame for frame in frames if not frame[0].startswith(_OWN)]
    users = [frame for frame in others if not frame[0].startswith(_HIGHER_ORDER)]
    return tuple(f"{file}:{line}" for file, line in users or others) or ("",)
