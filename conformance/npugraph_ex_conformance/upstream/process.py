"""Runs one test file in processes of its own: limits, crashes, and the chips that its tests name."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from npugraph_ex_conformance.upstream.checkout import Checkout, chips_in, first_chip
from npugraph_ex_conformance.upstream.nursery import Nursery
from npugraph_ex_conformance.upstream.outcome import UpstreamOutcome, cause_of

_MOST_CRASHES = 5
"""After so many a file is left."""
_LOOK = 0.25
"""Seconds between two looks at a process; they decide nothing but how late its end is noticed."""
_LOOKS_IDLE = 240
"""After so many looks at which the process neither wanted to run nor, in all, ran longer than a poll now and then takes, it waits
for something that does not come."""
_PRINTED = 2000
"""So many characters of what a process printed, its children's errors included, are part of the message of an early end."""
TICKS_IDLE = 10
"""Processor ticks that such polls may take in all: a process group that waits for a dead rank asks again and again."""


@dataclass(frozen=True)
class ProcessLimits:
    """What a file may take, and where it runs.

    Attributes:
        processor: seconds of processor time for each process.
        memory: GiB of resident memory for the processes of a file. The device has four times as much: some tests fill a part of it,
            others reserve what they never touch.
        devices: the number of emulated devices.
        chips: the chips that the emulated device knows.
    """

    processor: int
    memory: int
    devices: int
    chips: tuple[str, ...]
    _own: threading.local = field(default_factory=threading.local)

    def nursery(self, chip: str) -> Nursery:
        """The process of this thread that forks on a chip."""
        nurseries: dict[str, Nursery] = self._own.__dict__.setdefault("nurseries", {})
        if chip not in nurseries:
            kept = {name: value for name, value in os.environ.items() if not name.startswith("NPU_EMULATOR_")}
            cache = {name: os.environ[name] for name in ("NPU_EMULATOR_CACHE",) if name in os.environ}
            device = {"NPU_EMULATOR_DEVICES": str(self.devices), "NPU_EMULATOR_MEMORY_GB": str(4 * self.memory)}
            torchrun_and_all = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
            ours = {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "PATH": torchrun_and_all}
            nurseries[chip] = Nursery(chip, {**kept, **cache, **device, **ours})
        return nurseries[chip]


class _Ended(NamedTuple):
    """One process: the lines that it wrote, why it ended early, empty where it did not, and the end of what it printed."""

    lines: list[dict[str, Any]]
    why: str
    printed: str


def run_file(file: Path, checkout: Checkout, limits: ProcessLimits) -> list[UpstreamOutcome]:
    """All outcomes of one file: on its first chip, then those that skipped themselves there on the chip that they ask for."""
    name = checkout.name(file)
    first = first_chip(file, limits.chips)
    found = {outcome.test: outcome for outcome in _on_chip(file, checkout, limits, first, None)}
    wanted: dict[str, list[str]] = {}
    for outcome in found.values():
        if outcome.state == "skipped" and outcome.test:
            for chip in chips_in(outcome.cause, limits.chips):
                wanted.setdefault(chip, []).append(outcome.test)
    done: set[str] = set()
    for chip, tests in wanted.items():
        left = [test for test in tests if test not in done]
        if chip != first and left:
            again = _on_chip(file, checkout, limits, chip, left)
            done |= {outcome.test for outcome in again if outcome.state != "skipped"}
            found.update((outcome.test, outcome) for outcome in again)
    return list(found.values()) or [UpstreamOutcome(name, "", first, "skipped", "the file has no tests")]


def _on_chip(
    file: Path, checkout: Checkout, limits: ProcessLimits, chip: str, only: Collection[str] | None
) -> list[UpstreamOutcome]:
    """The outcomes on one chip; a process that ends in the middle of a test is followed by one for the tests after it."""
    name, found = checkout.name(file), dict[str, UpstreamOutcome]()
    for _ in range(_MOST_CRASHES):
        ended = _one_process(file, checkout, limits, chip, only, without=list(found))
        started = ""
        for line in ended.lines:
            started = line.get("started", started)
            if "test" in line:
                cause = cause_of(line["kind"], line["message"]) if line["state"] == "failed" else line["message"]
                found[line["test"]] = UpstreamOutcome(
                    name, line["test"], chip, line["state"], cause, line["message"], line.get("line", 0)
                )
        if not ended.why:
            break
        if started in found and started:
            started = ""
        found[started] = UpstreamOutcome(
            name, started, chip, "failed", ended.why, f"{ended.why}\n{ended.printed}".strip()
        )
        if not started:
            break
    return list(found.values())


def _one_process(
    file: Path, checkout: Checkout, limits: ProcessLimits, chip: str, only: Collection[str] | None, without: list[str]
) -> _Ended:
    with tempfile.TemporaryDirectory() as folder:
        answers, output, place = (Path(folder) / name for name in ("answers.jsonl", "output", "place"))
        answers.touch()
        place.mkdir()
        order = {"file": file, "tests": checkout.tests, "place": place, "output": output, "answers": answers}
        nursery = limits.nursery(chip)
        process = nursery.start(
            {name: str(path) for name, path in order.items()}
            | {"processor": limits.processor, "only": None if only is None else [*only], "without": without}
        )
        try:
            why, status = _watched(nursery, process, limits)
        finally:
            _end_session(process)
        lines = [json.loads(line) for line in answers.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
        said = output.read_text(encoding="utf-8", errors="replace").strip()
        if not why and status not in {0, 1, 5} and not any("test" in line for line in lines):
            why = f"pytest ended with status {status}: {said.splitlines()[-1] if said else 'nothing said'}"
        return _Ended(lines, why, said[-_PRINTED:])


def _watched(nursery: Nursery, process: int, limits: ProcessLimits) -> tuple[str, int]:
    """Wait for the end of a process; why it was early, or nothing, and its exit status."""
    idle, before, why = 0, 0, ""
    while (status := nursery.ended(_LOOK)) is None:
        ticks, running, memory = use_of(process)
        if running or ticks > before + TICKS_IDLE:
            idle, before = 0, ticks
        else:
            idle += 1
        if idle > _LOOKS_IDLE:
            why = "waits for something that does not come"
        elif memory > limits.memory << 30:
            why = f"takes more than {limits.memory} GiB of memory"
        if why:
            _end_session(process)
    if not why and status == -signal.SIGXCPU:
        why = f"takes more than {limits.processor} s of processor time"
    return why or (f"the process dies of {signal.Signals(-status).name}" if status < 0 else ""), status


def use_of(session: int) -> tuple[int, bool, int]:
    """Processor ticks, whether anything wants to run, and resident bytes of a session's processes."""
    ticks, running, pages = 0, False, 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(words[3]) == session:
            ticks += int(words[11]) + int(words[12])
            running = running or words[0] in "RD"
            pages += int(words[21])
    return ticks, running, pages * os.sysconf("SC_PAGE_SIZE")


def _end_session(process: int) -> None:
    """End a process and what it left behind."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process, signal.SIGKILL)
