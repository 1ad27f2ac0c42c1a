"""Measuring so that two figures of one run can be divided: side by side, in processor time, the best of many rounds."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping


def side_by_side(
    subjects: Mapping[str, Callable[[], object]], *, rounds: int = 25, calls: int = 100
) -> dict[str, float]:
    """Microseconds of this thread's processor time for one call of each subject.

    Subjects take turns, so that a busy machine or a change of clock speed touches all of them alike; of the rounds the
    fastest counts, since everything that disturbs a measurement makes it longer.

    Args:
        subjects: what to call, by name.
        rounds: how many turns each gets.
        calls: how many calls a turn is.
    """
    best = dict.fromkeys(subjects, float("inf"))
    for subject in subjects.values():
        for _ in range(calls):
            subject()
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, subject in subjects.items():
                start = time.thread_time()
                for _ in range(calls):
                    subject()
                best[name] = min(best[name], (time.thread_time() - start) / calls * 1e6)
    finally:
        gc.enable()
    return best
