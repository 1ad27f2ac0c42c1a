"""Notes what a process computes, so that another process knows what ended it, and leaves out what ended one before.

An operator may end its process: a division by zero in C++ is SIGFPE, a wrong address is SIGSEGV. No `except` catches these.
Nothing here imports torch: the process that waits has no use for it.
"""

from __future__ import annotations

import json
import mmap
import pickle
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

_MOST = 5
"""A rule that crashes more often is given up."""
_NOTE, _RESULTS = 1, 1 << 14
"""Where the note and the results begin in the shared memory. Its first byte counts the signals that the process has handled."""
_SIZE = 1 << 24
"""Of the shared memory in bytes; what is not written takes no memory."""
_LONGEST = 1000
"""Characters of a name in the note, so that the note fits."""


class CrashedError(Exception):
    """This was computed before, and ended the process."""


class Crash(NamedTuple):
    """What ended a process.

    Attributes:
        rule: that was validated; empty for none.
        where: what was computed, in words; empty for nothing in particular.
        signal: the name of the signal that ended it.
    """

    rule: str
    where: str
    signal: str

    @property
    def message(self) -> str:
        """What happened there."""
        return f"the process was stopped there by {self.signal}"


@dataclass
class FlightRecorder:
    """What a process computes, and the crashes of those before it.

    Attributes:
        memory: shared with the process that waits; None where none does.
        crashes: that ended processes before this one.
        rule: that is validated now.
        where: what is computed now.
    """

    memory: mmap.mmap | None = None
    crashes: list[Crash] = field(default_factory=list)
    rule: str = ""
    where: str = ""

    @staticmethod
    def shared() -> FlightRecorder:
        """One whose notes a process can read that forks this one."""
        return FlightRecorder(mmap.mmap(-1, _SIZE))

    # -- the process that waits ----------------------------------------------------------------------------------------

    def crashed(self, signal: str) -> Crash:
        """What the process was at that this signal ended; the next process will leave it out."""
        assert self.memory is not None  # noqa: S101 - somebody waited
        rule, where = json.loads(self.memory[_NOTE:_RESULTS].rstrip(b"\0") or b'["", ""]')
        self.crashes.append(Crash(rule, where, signal))
        self._note()
        return self.crashes[-1]

    @property
    def handled(self) -> int:
        """How many signals the process has handled."""
        return 0 if self.memory is None else self.memory[0]

    # -- the process that computes -------------------------------------------------------------------------------------

    def count_signal(self) -> None:
        """Note that a signal is handled."""
        if self.memory is not None:
            self.memory[0] = min(self.memory[0] + 1, 255)

    @contextmanager
    def validates(self, rule: str) -> Iterator[None]:
        """A block that validates one rule."""
        self.rule = rule[:_LONGEST]
        self._note()
        try:
            yield
        finally:
            self.rule = ""
            self._note()

    @contextmanager
    def computes(self, where: str, more: str) -> Iterator[None]:
        """A block that computes what the two texts name.

        Raises:
            CrashedError: that, or what the first text names, ended a process before.
        """
        full, before = f"{where}{more}"[:_LONGEST], self.where
        for crash in self.of_rule(self.rule):
            if crash.where in {where[:_LONGEST], full}:
                raise CrashedError(crash.message)
        self.where = full
        self._note()
        try:
            yield
        finally:
            self.where = before
            self._note()

    def of_rule(self, rule: str) -> list[Crash]:
        """The crashes in the validation of a rule."""
        return [crash for crash in self.crashes if crash.rule == rule[:_LONGEST]]

    def given_up(self, rule: str) -> str:
        """Why a rule is validated no more; empty if it is."""
        crashes = self.of_rule(rule)
        if len(crashes) > _MOST:
            return f"its validation was stopped {len(crashes)} times, for {crashes[-1].where} by {crashes[-1].signal}"
        return next((f"its validation was stopped by {crash.signal}" for crash in crashes if not crash.where), "")

    def results(self) -> dict[str, Any]:
        """What was found of the rules that were validated before a crash."""
        if self.memory is None or not self.memory[_RESULTS]:
            return {}
        self.memory.seek(_RESULTS)
        found: dict[str, Any] = pickle.load(self.memory)  # noqa: S301 - this program wrote it
        return found

    def keep(self, rule: str, result: object) -> None:
        """Keep what was found of a rule for the next process; where there is no more room it will be validated again."""
        if self.memory is not None:
            kept = pickle.dumps({**self.results(), rule: result})
            if len(kept) <= _SIZE - _RESULTS:
                self.memory[_RESULTS : _RESULTS + len(kept)] = kept

    def _note(self) -> None:
        if self.memory is not None:
            note = json.dumps([self.rule, self.where], ensure_ascii=False).encode("utf-8", "replace")
            self.memory[_NOTE:_RESULTS] = note.ljust(_RESULTS - _NOTE, b"\0")


_RECORDER: ContextVar[FlightRecorder | None] = ContextVar("_RECORDER", default=None)


@contextmanager
def recording(recorder: FlightRecorder) -> Iterator[None]:
    """A block whose computations are noted in a recorder."""
    token = _RECORDER.set(recorder)
    try:
        yield
    finally:
        _RECORDER.reset(token)


def current() -> FlightRecorder:
    """The recorder of the block, or one that notes nothing for anybody."""
    return _RECORDER.get() or FlightRecorder()


def watched(where: str, more: str = "") -> AbstractContextManager[None]:
    """A block that computes something.

    Args:
        where: it, in words; a crash in it ends all that has these words, whatever ``more`` says.
        more: what is special about it; a crash with it ends this alone.

    Raises:
        CrashedError: that ended a process before.
    """
    return current().computes(where, more)
