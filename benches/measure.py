"""Measuring so that two figures of one run can be divided: side by side, call by call, the median of the best round."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Mapping
from statistics import median
from time import thread_time_ns
from types import FrameType
from typing import Any


def side_by_side(
    subjects: Mapping[str, Callable[[], object]], *, rounds: int = 25, calls: int = 100
) -> dict[str, float]:
    """Microseconds of this thread's processor time for one call of each subject: waiting for the device is not counted.

    Subjects take turns, so that a busy machine or a change of clock speed touches all of them alike. Calls are timed one by
    one: what interrupts some of them leaves the median of a round where it was; of the rounds the fastest counts.

    Args:
        subjects: what to call, by name.
        rounds: how many turns each gets.
        calls: how many calls a turn is.
    """
    best = dict.fromkeys(subjects, float("inf"))
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, subject in subjects.items():
                best[name] = min(best[name], _median(subject, calls))
    finally:
        gc.enable()
    return best


def _median(subject: Callable[[], object], calls: int) -> float:
    times = []
    for _ in range(calls):
        start = thread_time_ns()
        subject()
        times.append(thread_time_ns() - start)
    return median(times) / 1e3


def instructions(function: Callable[[], object]) -> int:
    """How many instructions of Python's bytecode one call executes: the same on every machine, busy or not."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        del argument
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    function()
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count
