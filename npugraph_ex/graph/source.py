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
    trace = node.meta.get("stack_trace")
    return _line_in(trace) if trace else ""


@functools.lru_cache(maxsize=4096)
def _line_in(trace: str) -> str:
    """The line in a stack trace, which nodes of one line share."""
    frames = _FRAME.findall(trace)
    others = [frame for frame in frames if not frame[0].startswith(_OWN)]
    users = [frame for frame in others if not frame[0].startswith(_HIGHER_ORDER)]
    file, line = (users or others or [("", "")])[-1]
    return f"{file}:{line}" if file else ""
