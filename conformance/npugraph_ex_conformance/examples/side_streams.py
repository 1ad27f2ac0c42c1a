"""One example about `auto_streams`: a random integer program, divided by the compiler, whose order the device alone judges.

The stream check is off. On each schedule the results are eager mode's, and the device finds no race.
"""

from __future__ import annotations

import npu_emulator
from npugraph_ex.testing.generator.strategies import exact_programs, sample
from npugraph_ex.testing.oracle.case import Case
from npugraph_ex.testing.oracle.checking import check

_SCHEDULES = ("fifo", "lazy", "random:{}", "pct:{}:3")


def side_stream_example(seed: int) -> str:
    """What is wrong with the example that ``seed`` stands for; empty when nothing is."""
    schedule = _SCHEDULES[seed % len(_SCHEDULES)].format(seed)
    case = Case.of(sample(exact_programs(), seed), options={"auto_streams": True, "stream_check": "off"})
    with npu_emulator.schedule(schedule), npu_emulator.detect_races() as races:
        outcome = check(case)
    return next(iter((*outcome.failures, *(f"race on the schedule {schedule}: {race}" for race in races))), "")
