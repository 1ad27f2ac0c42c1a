"""Ctrl-C while the device runs a queued kernel: the kernel finishes, and the interrupt is raised after the replay.

The runtime calls a queued kernel, which is Python, from C++, and no exception can pass through C++. A kernel that stops in
the middle would also leave memory in a state that hardware never shows. So an interrupt inside a kernel is only noted, and
the runtime raises it again, by PyErr_SetInterrupt, before it returns to the program. A callback of torch_npu swallows
exceptions, so there the interrupt waits until the callback's caller continues. The program's own handler waits as Python's does.
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
    """Defers SIGINT inside some functions and everything that they call."""

    def __init__(self, inside: Sequence[CodeType], note: Callable[[], object], *, behind: CodeType) -> None:
        """Call `note` for an interrupt that arrives while a frame of one of `inside` is on the stack.

        One that arrives in a frame of `behind` is raised in that frame's caller.
        """
        self._inside = inside
        self._note = note
        self._behind = behind
        self._installed = False
        self._own: Callable[[int, FrameType | None], Any] = signal.default_int_handler
        self._noted = False

    def install(self) -> None:
        """Replace Python's own handler, once, from the main thread. A handler of the program stays, but for kernels."""
        if self._installed or threading.current_thread() is not threading.main_thread():
            return
        self._installed = True
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._handle)

    def postpone(self) -> bool:
        """Before a kernel: put this handler in the place of the program's own, if there is one; then call `resume` after it."""
        own = signal.getsignal(signal.SIGINT)
        if not callable(own) or own == self._handle or threading.current_thread() is not threading.main_thread():
            return False
        self._own, self._noted = own, False
        signal.signal(signal.SIGINT, self._handle)
        return True

    def resume(self) -> None:
        """Put the program's handler back, unless an interrupt waits for it."""
        if not self._noted:
            signal.signal(signal.SIGINT, self._own)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        looked_at = frame
        while looked_at is not None:
            if looked_at.f_code in self._inside:
                self._noted = True
                self._note()
                return
            if looked_at.f_code is self._behind and looked_at.f_back is not None:
                _call_in(looked_at.f_back, self._surface)
                return
            looked_at = looked_at.f_back
        self._surface(number, frame)

    def _surface(self, number: int, frame: FrameType | None) -> None:
        """What the program does with an interrupt: by its own handler if that one waited."""
        own, self._own, self._noted = self._own, signal.default_int_handler, False
        if own is not signal.default_int_handler:
            signal.signal(signal.SIGINT, own)
        own(number, frame)


def _call_in(frame: FrameType, handler: Callable[[int, FrameType], object]) -> None:
    """Call a handler of SIGINT, which may raise, at the next step of a frame that waits for a call."""
    before, before_in_frame = sys.gettrace(), frame.f_trace

    def surface(stepping: FrameType, event: str, value: object) -> Any:
        del event, value
        sys.settrace(before)
        frame.f_trace = before_in_frame
        handler(signal.SIGINT, stepping)

    sys.settrace(before or _ignore)
    frame.f_trace = surface


def _ignore(frame: FrameType, event: str, value: object) -> None:
    """Trace nothing. A frame's own trace function runs only if the thread has one."""
