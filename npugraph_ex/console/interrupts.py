"""Ctrl-C and SIGTERM for commands that take long: they stop at once, keep what they found, and leave no process behind."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

_PR_SET_CHILD_SUBREAPER = 36
_SOON = 0.001
"""Seconds after which an interrupt that nothing could catch is raised again."""
_NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGALRM: "the time that --after gives"}


@dataclass
class Interrupt:
    """The signal that asked a command to stop, once there is one.

    Attributes:
        number: of the first signal; 0 before any.
        after: seconds from `begin` after which the command stops by itself; None for never.
    """

    number: int = 0
    after: float | None = None

    def begin(self) -> None:
        """Start the clock of ``after``: what is to be stopped begins now."""
        if self.after is not None:
            signal.setitimer(signal.ITIMER_REAL, self.after)

    @property
    def status(self) -> int:
        """The exit status, as shells count it, 130 after Ctrl-C, 143 after SIGTERM; 0 when the time is over."""
        return 0 if self.number == signal.SIGALRM else 128 + (self.number or signal.SIGINT)

    def __str__(self) -> str:
        return _NAMES[signal.Signals(self.number or signal.SIGINT)]

    def check(self) -> None:
        """Raise KeyboardInterrupt again if the first one was lost, in a callback from C say."""
        if self.number:
            raise KeyboardInterrupt(self.number)


@contextmanager
def interruptible(*, after: float | None = None, on_signal: Callable[[], object] | None = None) -> Iterator[Interrupt]:
    """A block in which SIGINT and SIGTERM both raise KeyboardInterrupt with the signal's number; the interrupt remembers it, too.

    Args:
        after: seconds from ``Interrupt.begin`` after which the same happens by itself; None for never.
        on_signal: called at each of these signals.
    """
    stop = Interrupt(after=after)

    def handle(number: int, _frame: FrameType | None) -> None:
        stop.number = stop.number or number
        if on_signal is not None:
            on_signal()
        raise KeyboardInterrupt(stop.number)

    ignore = sys.unraisablehook

    def unraisable(lost: sys.UnraisableHookArgs) -> None:
        """Python ignores what is raised in a finalizer."""
        if stop.number and isinstance(lost.exc_value, KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, _SOON)
        else:
            ignore(lost)

    sys.unraisablehook = unraisable
    before = {number: signal.signal(number, handle) for number in _NAMES}
    try:
        yield stop
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.unraisablehook = ignore
        for number, handler in before.items():
            signal.signal(number, handler)


def end_children() -> None:
    """End all processes that descend from this one, so that nothing goes on after an interrupt.

    Some of them may start others at that moment. So this process adopts those whose parent it ends, and looks until it finds no
    more.
    """
    adopt = ctypes.CDLL(None).prctl
    adopt(_PR_SET_CHILD_SUBREAPER, 1)
    ended: set[int] = set()  # those that are sent the signal start no others, however long they take to go
    try:
        while found := _descendants() - ended:
            ended |= found
            for process in found:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(process, signal.SIGKILL)
    finally:
        adopt(_PR_SET_CHILD_SUBREAPER, 0)


def _descendants() -> set[int]:
    """The living processes that descend from this one."""
    parents, dead = {}, set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            process = int(stat.parent.name)
            # The name, in brackets, may hold spaces and brackets of its own.
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            parents[process] = int(parent)
            if state in "ZX":
                dead.add(process)
    found = {os.getpid()}
    while more := {process for process, parent in parents.items() if parent in found} - found:
        found |= more
    return found - dead - {os.getpid()}
