"""Keeps a process warm that runs items, watches it, and answers for an item that ends it. Imports nothing of torch."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from typing import Any, NamedTuple

from npugraph_ex_conformance.campaign.kinds import kind_named
from npugraph_ex_conformance.campaign.ledger import Row
from npugraph_ex_conformance.items import CampaignSettings
from npugraph_ex_conformance.upstream.process import TICKS_IDLE, use_of

_LOOK = 0.25
"""Seconds between two looks at a process that has not answered; they decide only how late its end is noticed."""
_LOOKS_IDLE = 240
"""After so many looks at which the process neither ran nor wanted to, it waits for something that does not come."""
_LAST_WORDS = 400
_SHRINKING = 20
"""A failure may be shrunk for so many times the limit of an item."""


class _Death(NamedTuple):
    """Why a process ended before it had answered."""

    state: str
    why: str


class WarmProcess:
    """One process that runs items; a new one when an item has ended it.

    Args:
        settings: of the campaign.
    """

    def __init__(self, settings: CampaignSettings) -> None:
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self._answers = -1
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the processes live
        self._run = 0
        """How many items the process has run."""

    def run(self, kind: str, number: int, node: str = "") -> Row:
        """Run one item.

        One that ends a process in which others ran before is run again in a new one: does it do so alone? So is one whose process
        was killed from outside.
        """
        before = self._run
        answer = self._ask(kind, {"kind": kind, "number": number})
        # No program sends itself this signal: the kernel did, for want of memory, or somebody else.
        outside = isinstance(answer, _Death) and "SIGKILL" in answer.why
        if isinstance(answer, _Death) and (before or outside):
            again = self._ask(kind, {"kind": kind, "number": number})
            if isinstance(again, _Death) or outside:
                answer = again
            else:
                why = f"{answer.why}, in a process that had run {before} items before; alone the item {again['state']}"
                answer = answer._replace(why=why)
        if isinstance(answer, _Death):
            return Row(kind, number, answer.state, message=answer.why, node=node)
        fields = {name: value for name, value in answer.items() if name != "memory"}
        return Row(kind, number, node=node, **{**fields, "new": tuple(fields["new"])})

    def ask(self, order: dict[str, Any]) -> dict[str, Any]:
        """Another order: the size of a kind, or to shrink one of its items; empty if the process did not live to answer."""
        answer = self._ask(order["kind"], order, times=_SHRINKING)
        return {} if isinstance(answer, _Death) else answer

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            assert self._process.stdin is not None
            with suppress(OSError):
                self._process.stdin.close()
            os.close(self._answers)
            self._process, self._run = None, 0

    def _start(self) -> subprocess.Popen[bytes]:
        self._said.truncate(0)
        self._answers, theirs = os.pipe()
        process = subprocess.Popen(
            [sys.executable, "-m", "npugraph_ex_conformance.campaign.child", json.dumps(asdict(self._settings)), str(theirs)],
            stdin=subprocess.PIPE, stdout=self._said, stderr=self._said, pass_fds=(theirs,), start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        os.close(theirs)
        return process

    def _ask(self, kind: str, order: dict[str, Any], times: int = 1) -> dict[str, Any] | _Death:
        """The answer to an order, or why there is none; then the process is gone."""
        fresh = self._process is None
        self._process = self._process or self._start()
        seconds = times * (self._settings.processor or kind_named(kind).processor)
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it ended between two orders, which reading will notice
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()
        answer = self._read(self._process.pid, seconds)
        if not isinstance(answer, _Death) and answer.get("memory", 0) > self._settings.memory * 2**30:
            # It may be the sum of what all items left behind; then the item alone says nothing, and the process is done with.
            answer = _Death("too much memory", f"took {answer['memory'] / 2**30:.1f} GiB")
            answer = answer if fresh else answer._replace(why=f"{answer.why} in the end")
        if isinstance(answer, _Death):
            self.close()
        else:
            self._run += 1
        return answer

    def _read(self, process: int, seconds: int) -> dict[str, Any] | _Death:
        line, idle, before, first = b"", 0, 0, -1
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([self._answers], [], [], _LOOK)
            if ready:
                part = os.read(self._answers, 1 << 16)
                if not part:
                    return self._crash()
                line += part
                continue
            ticks, running, memory = use_of(process)
            first = ticks if first < 0 and self._run else max(first, 0)
            idle, before = (0, ticks) if running or ticks > before + TICKS_IDLE else (idle + 1, before)
            if idle > _LOOKS_IDLE:
                return _Death("hung", "waits for something that does not come")
            # Memory first: to fill it takes time, too.
            if memory > self._settings.memory * 2**30:
                return _Death("too much memory", f"takes more than {self._settings.memory:g} GiB of memory")
            if ticks - first > seconds * os.sysconf("SC_CLK_TCK"):
                return _Death("too long", f"takes more than {seconds} s of processor time")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _crash(self) -> _Death:
        assert self._process is not None
        status = self._process.wait()
        how = f"dies of {signal.Signals(-status).name}" if status < 0 else f"ends with status {status}"
        self._said.seek(0)
        words = self._said.read().decode(errors="replace").strip().splitlines()
        return _Death("crashed", f"the process {how}{f': {words[-1][-_LAST_WORDS:]}' if words else ''}")


@cache
def _process_for(settings: CampaignSettings) -> WarmProcess:
    """The process of this worker: warm from one batch to the next."""
    return WarmProcess(settings)


def run_batch(settings: CampaignSettings, kind: str, numbers: tuple[int, ...]) -> list[Row]:
    """What a worker does with a batch."""
    process, node = _process_for(settings), f"{os.uname().nodename}:{os.getppid()}"
    return [process.run(kind, number, node) for number in numbers]


def ask(settings: CampaignSettings, order: dict[str, Any]) -> dict[str, Any]:
    """What a worker does with another order."""
    return _process_for(settings).ask(order)
