"""Schedules: the orders in which the device may run queued work, as strings that replay a run.

    fifo              all work at its launch, in launch order (the default)
    lazy              nothing until something waits for it
    random:SEED       any legal interleaving
    pct:SEED:DEPTH    random stream priorities that change at DEPTH - 1 points: finds deep orderings sooner
    choices:0.2.1     the n-th decision between several ready tasks takes the n-th number; `exhaustive` writes these

The same program under the same string runs in the same order, in this process or another.

A program with a race often finds the right values of an earlier run in memory, and so gives the right result in a wrong
order. Therefore all schedules except fifo poison memory (npu_emulator/memory), and a search through every order also uses the
race detector.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from npu_emulator.errors import EmulatorError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from npu_emulator.device import Runtime

__all__ = ["Schedule", "exhaust", "is_searching", "parse", "report_misfit", "same_values", "switched"]

Result = TypeVar("Result")
_POLICIES = ("fifo", "lazy", "random", "pct", "choices")
_GRAMMAR = (
    "'fifo', 'lazy', 'random:SEED', 'pct:SEED:DEPTH' with a DEPTH from 1, or 'choices:0.2.1' as every_order writes it"
)


class Schedule(NamedTuple):
    """A schedule in the runtime's form."""

    policy: int
    seed: int = 0
    depth: int = 1
    choices: tuple[int, ...] = ()


def parse(text: str) -> Schedule:
    """Read a schedule string; raise EmulatorError for anything else."""
    name, *rest = text.split(":")
    numbers = [part for part in rest if part.isdigit()]
    if name in {"fifo", "lazy"} and not rest:
        return Schedule(_POLICIES.index(name))
    if name == "random" and len(rest) == len(numbers) == 1:
        return Schedule(2, int(rest[0]))
    if name == "pct" and len(rest) == len(numbers) == 2 and int(rest[1]) > 0:
        return Schedule(3, int(rest[0]), int(rest[1]))
    parts = rest[0].split(".") if len(rest) == 1 and rest[0] else []  # a program without decisions has none
    if name == "choices" and len(rest) == 1 and all(part.isdigit() for part in parts):
        return Schedule(4, choices=tuple(map(int, parts)))
    raise EmulatorError(f"a schedule (NPU_EMULATOR_SCHEDULE) must be {_GRAMMAR}, got {text!r}")


@contextmanager
def switched(runtime: Runtime, text: str) -> Iterator[None]:
    """Run the block under a schedule, then restore the earlier one. Queued work is finished at both ends.

    Raises:
        EmulatorError: the schedule has another form, chooses a task that is not there, or has choices left at the end.
    """
    schedule = parse(text)
    made = len(runtime.decisions())
    before = runtime.schedule._replace(choices=runtime.schedule.choices[made:])  # an outer block goes on where it was
    runtime.set_schedule(schedule)
    try:
        yield
        wrong = misfit(runtime, text)
        if wrong:
            raise EmulatorError(wrong)
    finally:
        runtime.set_schedule(before)


def misfit(runtime: Runtime, text: str) -> str:
    """Finish the queued work; say why the choices of the schedule in force are not this program's, empty if they are."""
    given, decisions = runtime.schedule.choices, runtime.decisions()
    earlier = len(parse(text).choices) - len(given)
    for number, (wanted, (_, ready)) in enumerate(zip(given, decisions, strict=False), earlier + 1):
        if wanted >= ready:
            return (
                f"decision {number} of the schedule {text!r} takes task {wanted}, but only 0 to {ready - 1} were ready: "
                "it is the string of another program"
            )
    if len(given) <= len(decisions):
        return ""
    left = ".".join(map(str, given[len(decisions) :]))
    return (
        f"the program decided {earlier + len(decisions)} times between ready tasks, and the schedule {text!r} has choices for "
        f"{earlier + len(given)} decisions: {left} was left over, so it is the string of another program"
    )


def report_misfit(runtime: Runtime, text: str) -> None:
    """At the end of a process, say on stderr if the choices of its schedule were not this program's."""
    wrong = misfit(runtime, text)
    if wrong:
        sys.stderr.write(f"npu_emulator: {wrong}\n")


def is_searching(text: str) -> bool:
    """Tell whether a schedule searches for races: any except fifo."""
    return parse(text).policy != 0


def same_values(left: object, right: object) -> bool:
    """Tell whether two results have the same numbers, not-a-number included; unknown objects are compared with `==`."""
    import torch
    from torch.utils._pytree import tree_flatten

    (lefts, left_form), (rights, right_form) = tree_flatten(left), tree_flatten(right)
    if left_form != right_form:
        return False
    for one, other in zip(lefts, rights, strict=True):
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            if one.shape != other.shape or not torch.allclose(one, other, rtol=0, atol=0, equal_nan=True):
                return False
        elif one != other:
            return False
    return True


def exhaust(runtime: Runtime, program: Callable[[], Result], limit: int) -> Iterator[tuple[str, Result]]:
    """Run `program` once under every order of its queued work; yield (schedule string, result).

    The program must wait for its results itself, and must not depend on the result of a query. Raises EmulatorError after
    `limit` runs: such a program is too large to exhaust.
    """
    prefix: list[int] = []
    for _ in range(limit):
        text = "choices:" + ".".join(map(str, prefix))
        with switched(runtime, text):
            result = program()
            decisions = runtime.decisions()
        yield "choices:" + ".".join(str(decided) for decided, _ in decisions), result
        while decisions and decisions[-1][0] + 1 == decisions[-1][1]:
            decisions.pop()
        if not decisions:
            return
        prefix = [decided for decided, _ in decisions]
        prefix[-1] += 1
    raise EmulatorError(
        f"there are more than {limit} orders; make the program smaller, or use random:SEED or pct:SEED:DEPTH"
    )
