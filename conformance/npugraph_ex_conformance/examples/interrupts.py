"""Ctrl-C at a chosen point of a call: where Python looks for signals while the library's or the emulator's code runs.

Python looks when a function begins, when a loop goes round and when a call into C has returned; so one run can stop at each
place at which a user's Ctrl-C can stop it.
"""

from __future__ import annotations

import dis
import signal
import sys
import threading
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import npu_emulator
import npugraph_ex

_WITHIN = tuple(f"{Path(str(package.__file__)).parent}/" for package in (npugraph_ex, npu_emulator))
_LOOKS = ("CALL", "RESUME", "JUMP_BACKWARD", "JUMP_ABSOLUTE")
"""What the names of the instructions behind which Python looks begin with."""


def interrupted(function: Callable[[], object], at: int) -> bool:
    """Whether Ctrl-C at point number ``at`` of a call was lost: it stopped nothing. A call with fewer points gets none.

    The handler is the example's own: the program around it sees no signal, and may ignore SIGINT.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or handler is None:  # one that Python cannot put back
        return False
    left, before, sent = at, sys.gettrace(), False

    def enter(frame: FrameType, event: str, value: object) -> Any:
        del event, value
        if not frame.f_code.co_filename.startswith(_WITHIN):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return step

    def step(frame: FrameType, event: str, value: object) -> Any:
        nonlocal left, sent
        del value
        if event == "opcode" and frame.f_lasti in _points(frame.f_code):
            left -= left > 1 or not _swallowed(frame)
            if not left:
                sent = True
                sys.settrace(before)
                signal.raise_signal(signal.SIGINT)
        return step

    signal.signal(signal.SIGINT, _stop)
    sys.settrace(enter)
    try:
        function()
    except KeyboardInterrupt:
        return False
    finally:
        sys.settrace(before)
        signal.signal(signal.SIGINT, handler)
    return sent


def _swallowed(frame: FrameType | None) -> bool:
    """Whether torch_npu reports an allocation to the emulator here: it prints what a handler raises, and continues."""
    while frame is not None and frame.f_code.co_name != "fire_callbacks":
        frame = frame.f_back
    return frame is not None


def _stop(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@cache
def _points(code: CodeType) -> frozenset[int]:
    """The offsets of the instructions before which Python looks for signals."""
    names = [(one.offset, one.opname) for one in dis.get_instructions(code) if one.opname != "CACHE"]
    return frozenset(offset for (_, done), (offset, _) in pairwise(names) if done.startswith(_LOOKS))
