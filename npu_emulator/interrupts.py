"""Ctrl-C while the device runs a queued kernel: the kernel is finished, and the interrupt surfaces behind the replay.

A queued kernel is Python that the runtime calls from C++, through which no exception can travel; and a kernel that is torn in
two would leave memory that no hardware ever shows. So an interrupt that arrives inside one is only noted, and the runtime
raises it again, by PyErr_SetInterrupt, when it is about to return to the program.
"""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import CodeType, FrameType

__all__ = ["Interrupts"]


class Interrupts:
    """Defers SIGINT inside some functions, and whatever they call."""

    def __init__(self, inside: Sequence[CodeType], note: Callable[[], object]) -> None:
        """Call `note` for an interrupt that arrives while a frame of one of `inside` is on the stack."""
        self._inside = inside
        self._note = note
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
            looked_at = looked_at.f_back
        signal.default_int_handler(number, frame)
