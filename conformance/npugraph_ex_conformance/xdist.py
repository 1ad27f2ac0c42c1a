"""What a test drew and found travels with its report, from whichever process ran it to the one that keeps the books.

With ``-n 2`` (pytest-xdist) tests run in worker processes. Their examples are part of the report; what a worker knows only
at its end, its slowest example and what was wrong with the list of known failures, is xdist's ``workeroutput``.
"""

from __future__ import annotations

import gc
from collections.abc import Generator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import pytest

from npugraph_ex_conformance.results import Entry, Failure, Slowest, entry_of

if TYPE_CHECKING:
    from npugraph_ex_conformance.session import Run

_NOTE = "conformance"


@dataclass(frozen=True)
class WorkerNote:
    """What came of one test.

    Attributes:
        entries: its examples, where the process that ran it does not keep the books.
        models: the tables that it added.
        failure: what is known of its failure.
    """

    entries: tuple[Entry, ...] = ()
    models: tuple[dict[str, Any], ...] = ()
    failure: Failure | None = None


def is_worker(config: pytest.Config) -> bool:
    """Whether this process only runs tests for another one, which keeps the books."""
    return hasattr(config, "workerinput")


class Notes:
    """Writes them, in every process that runs tests."""

    def __init__(self, run: Run, config: pytest.Config) -> None:
        self._run = run
        self._config = config

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A test begins; what it draws is entered under its name."""
        self._run.begin(nodeid)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Plain data, because it may go through a pipe."""
        report = yield
        run, entries = self._run, list[Entry]()
        if is_worker(self._config):
            entries, run.books.entries = run.books.entries, entries
        setattr(report, _NOTE, asdict(WorkerNote(tuple(entries), tuple(run.models), run.failure)))
        return report

    def pytest_sessionfinish(self) -> None:
        """The slowest example of a worker."""
        if not is_worker(self._config):
            return
        slowest = self._run.timed_slowest()
        if slowest is not None:
            self._config.workeroutput["slowest"] = asdict(slowest)  # type: ignore[attr-defined] # xdist's
        # pytest collects garbage five times at its end; execnet interrupts a worker that takes five seconds to go.
        gc.freeze()


def note_of(report: pytest.TestReport) -> WorkerNote:
    """What the report's test drew and found; nothing if its process died."""
    note = getattr(report, _NOTE, {})
    failure = note.get("failure")
    return WorkerNote(
        tuple(map(entry_of, note.get("entries", ()))),
        tuple(note.get("models", ())),
        None if failure is None else Failure(**failure),
    )


def slowest_of(node: Any) -> Slowest | None:
    """The slowest example of a worker that has ended."""
    found = getattr(node, "workeroutput", {}).get("slowest")
    return None if found is None else Slowest(**found)
