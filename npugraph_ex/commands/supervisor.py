"""Runs the rest of a command in a child process, and once more without what crashed it.

A crash ends a process before it can say what it found. So one process waits that computes nothing: it has not imported torch, whose
threads do not survive a fork, and says why it begins again.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from npugraph_ex.errors import UsageError
from npugraph_ex.testing.crashes import Crash, FlightRecorder

_CRASHES = frozenset({signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV})
_INTERRUPTS = (signal.SIGINT, signal.SIGTERM)
_PR_SET_PDEATHSIG = 1
_GRACE = 0.2
"""Seconds in which a child process handles a signal that was sent to both. What it has not begun to handle counts once."""


def supervise(recorder: FlightRecorder, *, quiet: bool) -> int | None:
    """Fork this process, and again without what crashed the child process.

    A signal that a user sends ends both.

    Args:
        recorder: where the child process notes what it computes.
        quiet: do not say that it begins again.

    Returns:
        None in the child process, which goes on with the command; in the process that waited, the command's exit status.

    Raises:
        UsageError: the child process crashed where it noted no rule.
    """
    while True:
        sys.stdout.flush()
        sys.stderr.flush()
        signal.pthread_sigmask(signal.SIG_BLOCK, _INTERRUPTS)
        child = os.fork()
        if not child:
            _begin(recorder)
            return None
        with _passed_on(child, recorder) as received:
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status >= 0:
            return status
        number = signal.Signals(-status)
        if number not in _CRASHES or received:
            _end_by(received[0] if received else number)
        crash = recorder.crashed(number.name)
        _clear_progress()
        if not crash.rule:
            raise UsageError(
                f"{crash.signal} stopped the process outside the validation of a rule, such as in the import of the module; "
                "Python shows where with PYTHONFAULTHANDLER=1"
            )
        if not quiet:
            sys.stderr.write(f"npugraph-ex: {_why_again(crash, recorder)}\n")


def _why_again(crash: Crash, recorder: FlightRecorder) -> str:
    """What a user is told."""
    where = f" for {crash.where}" if crash.where else ""
    without = "this rule" if recorder.given_up(crash.rule) else "that"
    return f"{crash.signal} stopped the validation of {crash.rule}{where}; it begins again without {without}"


def _begin(recorder: FlightRecorder) -> None:
    """Make a forked process end with the one that waits for it, and count the signals that it handles."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        recorder.count_signal()
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _INTERRUPTS)


@contextmanager
def _passed_on(child: int, recorder: FlightRecorder) -> Iterator[list[signal.Signals]]:
    """A block in which Ctrl-C and SIGTERM go to the child process; yields those that came.

    A terminal sends Ctrl-C to both processes. A second one would disturb a child process that prints what it found after the first.
    """
    received: list[signal.Signals] = []

    def pass_on(number: int, _frame: FrameType | None) -> None:
        received.append(signal.Signals(number))
        until = time.monotonic() + _GRACE
        while recorder.handled < len(received) and time.monotonic() < until:
            time.sleep(0.01)
        if recorder.handled < len(received):
            with suppress(ProcessLookupError):
                os.kill(child, number)

    before = {number: signal.signal(number, pass_on) for number in _INTERRUPTS}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _INTERRUPTS)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_by(number: signal.Signals) -> None:
    """End this process by a signal, as it ended the other one."""
    with suppress(OSError):  # of SIGKILL, which nobody handles
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _clear_progress() -> None:
    """Take the bar of a process that crashed from the terminal, and show the cursor."""
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K\x1b[?25h")
