"""The stdout of a command whose result another program reads: what the user's program prints goes to stderr."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from typing import TextIO

_STDOUT, _STDERR = 1, 2


@contextmanager
def result_alone(*, alone: bool, whole_process: bool = False) -> Iterator[TextIO]:
    """The stdout of before, for a command's result; with ``alone``, what else the block and its child processes print is on stderr.

    A child process has no ``sys.stdout`` of this one: it inherits the descriptor, which therefore leads to stderr, too. Where the
    command is the ``whole_process``, it leads there to the end: functions of `atexit` and daemon threads print behind the block.
    """
    out = sys.stdout
    if not alone:
        yield out
        return
    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(sys.stderr))
        if _descriptor(out) == _STDOUT:  # not where somebody captures what is printed
            out.flush()
            before = os.dup(_STDOUT)
            stack.callback(os.close, before)
            if not whole_process:
                stack.callback(os.dup2, before, _STDOUT)
            os.dup2(_STDERR, _STDOUT)
            out = stack.enter_context(open(before, "w", encoding=out.encoding, errors=out.errors, closefd=False))
        yield out


def _descriptor(stream: TextIO) -> int | None:
    try:
        return stream.fileno()
    except (OSError, ValueError, AttributeError):
        return None
