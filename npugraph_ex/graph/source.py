"""The line of the user's code that a node comes from."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch
from torch import fx

_NOT_THE_USERS = (
    f"{Path(__file__).parents[1]}{os.sep}",
    f"{Path(torch.__file__).parent / '_higher_order_ops'}{os.sep}",  # in the stack of `torch.cond` before torch 2.11
)
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')


def source_line(node: fx.Node) -> str:
    """``file:line`` of the user code of ``node``; empty if the graph does not know it."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    users = [frame for frame in frames if not frame[0].startswith(_NOT_THE_USERS)]
    file, line = (users or frames or [("", "")])[-1]
    return f"{file}:{line}" if file else ""
