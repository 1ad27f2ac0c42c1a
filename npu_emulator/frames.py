"""Which lines of the user's program led to a launch."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any

from torch.fx.interpreter import Interpreter

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["python_line", "python_place", "user_frames"]

_NOT_THE_USERS = ("/npu_emulator/", "/torch/", "/torch_npu/", "<frozen ")
_RUNS_A_NODE = Interpreter.run_node.__code__
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (.+)')


def python_line() -> str:
    """Name the innermost line of the user's program that led here."""
    frames = user_frames(1)
    return frames[0].partition(" in ")[0] if frames else "an unknown line"


def python_place() -> str:
    """Name the line of the user's program that led here, and the function of torch or torch_npu that it called, if any."""
    frame: Any = sys._getframe(1)  # noqa: SLF001 - as in user_frames
    called = ""
    while frame is not None:
        code = frame.f_code
        if not any(part in code.co_filename for part in _NOT_THE_USERS):
            return f"{code.co_filename}:{frame.f_lineno}{called}"
        if "/npu_emulator/" not in code.co_filename:
            called = f" (in {frame.f_globals.get('__name__', '')}.{code.co_qualname})"
        frame = frame.f_back
    return "an unknown line"


def user_frames(limit: int = 6) -> tuple[str, ...]:
    """Name the lines of the user's program that led here, innermost first: torch's and our own frames tell nothing.

    Where an FX graph is interpreted, the lines from which its node was traced come first.
    """
    found: list[str] = []
    frame: Any = sys._getframe(1)  # noqa: SLF001 - walking frames one by one is far cheaper than traceback.extract_stack
    while frame is not None and len(found) < limit:
        code = frame.f_code
        if code is _RUNS_A_NODE:
            found += _traced_from(frame.f_locals.get("n"))
        elif not any(part in code.co_filename for part in _NOT_THE_USERS):
            found.append(f"{code.co_filename}:{frame.f_lineno} in {code.co_name}")
        frame = frame.f_back
    return tuple(found[:limit])


def _traced_from(node: Any) -> Iterator[str]:
    """The lines that a graph's node remembers, innermost first."""
    trace = getattr(node, "meta", {}).get("stack_trace") or ""
    for file, line, name in reversed(_FRAME.findall(trace)):
        yield f"{file}:{line} in {name}"
