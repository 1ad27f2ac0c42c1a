"""Ctrl-C while the device runs a queued kernel: the kernel is finished, and the interrupt surfaces behind the replay.

A queued kernel is Python that the runtime calls from C++, through which no exception can travel; and a kernel that is torn in
two would leave memory that no hardware ever shows. So an interrupt that arrives inside one is only noted, and the runtime
raises it again, by PyErr_SetInterrupt, when it is about to return to the program. In a callback of torch_npu's,
which swallows exceptions, it waits until the frame behind the callback goes on.
"""

from __future__ import annotations

import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import CodeType, FrameType

__all__ = ["Interrupts"]


class Interrupts:
    """Defers SIGINT inside some functions, and whatever they call."""

    def __init__(self, inside: Sequence[CodeType], note: Callable[[], object], *, behind: CodeType) -> None:
        """Call `note` for an interrupt that arrives while a frame of one of `inside` is on the stack.

        One that arrives in a frame of `behind` is raised in that frame's caller.
        """
        self._inside = inside
        self._note = note
        self._behind = behind
        self._installed = False

    def install(self) -> None:
        """Take Python's own handler's place, once, from the main thread; a handler of the program's is left alone."""
        if self._installed or threading.current_thread() is not threading.main_thread():
            return
        self._installed = True
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        looked_at = frame
        while looked_at is not None:
            if looked_at.f_code in self._inside:
                self._note()
                return
            if looked_at.f_code is self._behind and looked_at.f_back is not None:
                _raise_in(looked_at.f_back)
                return
            looked_at = looked_at.f_back
        signal.default_int_handler(number, frame)


def _raise_in(frame: FrameType) -> None:
    """Raise KeyboardInterrupt at the next step of a frame that waits for what it has called."""
    before, before_in_frame = sys.gettrace(), frame.f_trace

    def surface(stepping: FrameType, event: str, value: object) -> Any:
        del stepping, event, value
        sys.settrace(before)
        frame.f_trace = before_in_frame
        raise KeyboardInterrupt

    sys.settrace(before or _ignore)
    frame.f_trace = surface


def _ignore(frame: FrameType, event: str, value: object) -> None:
    """Trace nothing: a frame's own function is asked only while there is one of the thread."""
