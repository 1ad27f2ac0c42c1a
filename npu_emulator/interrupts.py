"""Ctrl-C does not raise in a callback from C++, which would swallow the exception.

The runtime calls no Python, kernels above all, that an interrupt can stop: `runtime/interrupts.cpp` notes it. A callback of
torch_npu prints an exception and continues, so the callback's caller raises in its place.
"""

from __future__ import annotations

import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, FrameType

__all__ = ["Interrupts"]


class Interrupts:
    """Raises what waits in the program."""

    def __init__(self, behind: CodeType) -> None:
        """Raise what comes in a frame of `behind` in that frame's caller."""
        self._behind = behind
        self._installed = False

    def install(self) -> None:
        """Replace Python's own handler, once, from the main thread. A handler of the program stays."""
        if self._installed or threading.current_thread() is not threading.main_thread():
            return
        self._installed = True
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._handle)

    def surface(self, error: BaseException | None = None) -> None:
        """Raise an exception that has waited for the runtime, or what the program's handler raises if the signal has."""

        def surface(frame: FrameType | None) -> None:
            if error is not None:
                raise error
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):
                handler(signal.SIGINT, frame)
            else:
                signal.raise_signal(signal.SIGINT)

        self._outside(sys._getframe(1), surface)  # noqa: SLF001 - the frame that the runtime interrupts

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._outside(frame, lambda frame: signal.default_int_handler(number, frame))

    def _outside(self, frame: FrameType | None, surface: Callable[[FrameType | None], object]) -> None:
        """Call what may raise, in a frame or in the caller of the frame's callback."""
        looked_at = frame
        while looked_at is not None:
            if looked_at.f_code is self._behind and looked_at.f_back is not None:
                _call_in(looked_at.f_back, surface)
                return
            looked_at = looked_at.f_back
        surface(frame)


def _call_in(frame: FrameType, surface: Callable[[FrameType | None], object]) -> None:
    """Call what may raise at the next step of a frame that waits for a call."""
    before, before_in_frame = sys.gettrace(), frame.f_trace

    def step(stepping: FrameType, event: str, value: object) -> Any:
        del event, value
        sys.settrace(before)
        frame.f_trace = before_in_frame
        surface(stepping)

    sys.settrace(before or _ignore)
    frame.f_trace = step


def _ignore(frame: FrameType, event: str, value: object) -> None:
    """Trace nothing. A frame's own trace function runs only if the thread has one."""
