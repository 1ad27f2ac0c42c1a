"""What a person sees: the target first, progress, the tables at the end, and the page. A pytest plugin; decides nothing."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
from tabulate import tabulate

from npugraph_ex._plurals import counted, noun
from npugraph_ex.console.progress import Progressed, uncaptured_progress
from npugraph_ex_conformance.folders import next_earlier, write_whole
from npugraph_ex_conformance.junit import junit
from npugraph_ex_conformance.results import Finished
from npugraph_ex_conformance.xdist import note_of, slowest_of

if TYPE_CHECKING:
    from npugraph_ex_conformance.session import Run

_OUTCOMES = {"passed": "ok", "skipped": "skipped", "failed": "WRONG", "xfailed": "known"}


class Reporter:
    """Prints for one run. On a terminal a bar counts examples; elsewhere each test is one line, or, if quiet, each failure."""

    def __init__(self, run: Run, config: pytest.Config) -> None:
        self._run = run
        self._config = config
        self._start = time.monotonic()
        self._block = ExitStack()
        self._reached: Progressed | None = None
        self._done = 0
        self._tests: set[str] = set()

    def pytest_report_header(self) -> list[str]:
        """Target, versions and seed, before anything else."""
        from npugraph_ex.testing import Limits

        lines = self._run.target.describe(seed=self._run.seed).splitlines()
        lines.append(f"{'judge':<12} {Limits()}")
        books = self._run.books
        if passed := len(books.done):
            lines.append(f"{'resumed':<12} {counted(passed, 'test')} passed before, not run again")
        elif books.folder is not None and (place := next_earlier(books.folder)):
            lines.append(f"{'earlier':<12} the results that are in {books.folder} are moved to {place}")
        return [*lines, *([f"{'mutant':<12} {self._run.mutant} (this run must fail)"] if self._run.mutant else [])]

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """The tests of this process."""
        self._show([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        """The tests of the workers: all have the same ones."""
        if not self._tests:
            self._show(ids)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """A worker has ended."""
        self._run.books.keep_slower(slowest_of(node))

    def _show(self, tests: list[str]) -> None:
        """Note which tests there are, begin to write, and start the bar, if there is somebody to look at it."""
        self._tests = set(tests)
        if tests:
            self._run.books.start()
        reporter: Any = self._config.pluginmanager.get_plugin("terminalreporter")
        reporter.showfspath = False
        writer = self._config.get_terminal_writer()
        if not writer.hasmarkup or self._config.get_verbosity():
            return
        self._reached = self._block.enter_context(uncaptured_progress(len(tests), quiet=False))
        self._run.on_example = self._example

    def _example(self) -> None:
        if self._reached is not None:
            name = self._run.test.rpartition("::")[2]
            self._reached(self._done, f"{counted(len(self._run.books.entries), 'program')} · {name}")

    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """No dots: the bar or the lines say it."""
        if hasattr(report, "wasxfail"):
            return None
        return (report.outcome, "", report.outcome.upper()) if report.when == "call" or not report.passed else None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One test is done, or what is around it failed."""
        if report.when != "call" and report.passed:
            return
        outcome = "xfailed" if report.skipped and hasattr(report, "wasxfail") else report.outcome
        text = report.longreprtext if report.failed else getattr(report, "wasxfail", "") or _why_skipped(report)
        note, books = note_of(report), self._run.books
        for entry in note.entries:
            books.add(entry)
        books.finish(Finished(report.nodeid, outcome, round(report.duration, 2), text, note.models, note.failure))
        if self._reached is not None:
            self._done += 1
            self._example()
            return
        if outcome != "failed" and self._config.get_verbosity() < 0:
            return
        reporter: Any = self._config.pluginmanager.get_plugin("terminalreporter")
        name = report.nodeid.split("::", 1)[-1]
        count = len(books.entries)
        reporter.write_line(
            f"{_OUTCOMES[outcome]:<8}{report.duration:6.1f} s  {count:5d} {noun(count, 'program')}  {name}"
        )

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter, exitstatus: int) -> None:
        """The tables, and the page."""
        from npugraph_ex_conformance.page import (
            HEADERS,
            LEGEND,
            PASS_HEADERS,
            RATE_HEADERS,
            page,
            pass_rows,
            pattern_rows,
            rate_rows,
        )

        self._block.close()
        run, books = self._run, self._run.books
        if exitstatus != pytest.ExitCode.INTERRUPTED:  # who interrupts does not wait for another example
            books.keep_slower(run.timed_slowest())
        books.close()
        write = terminalreporter.write_line
        if books.entries:
            terminalreporter.section("patterns, capture and streams")
            write(tabulate(pattern_rows(run), headers=HEADERS, tablefmt="simple", disable_numparse=True))
            write(f"\n{LEGEND}")
            write(f"\n{counted(len(books.entries), 'program')}, on {run.target.device}, seed {run.seed}")
            for title, headers, rows in (
                ("passes", PASS_HEADERS, pass_rows(run)),
                ("speed", RATE_HEADERS, rate_rows(run)),
            ):
                terminalreporter.section(title)
                write(tabulate(rows, headers=headers, tablefmt="simple", disable_numparse=True))
        for model in (model for test in books.finished for model in test.models):
            terminalreporter.section(f"model: {model['name']}")
            write(tabulate(model["rows"], headers=model["headers"], tablefmt="simple"))
            for part in model.get("parts", ()):
                write("\n" + tabulate(part["rows"], headers=part["headers"], tablefmt="simple"))
            write(f"\n{model['note']}")
        seconds = time.monotonic() - self._start
        write("")
        if books.folder is not None and (books.is_open or books.finished):  # not where no test was found
            tests = self._tests | {test.test for test in books.finished}
            write_whole(books.folder / "junit.xml", junit(books.finished))
            path = books.folder / "report.html"
            write_whole(path, page(run, seconds=seconds, tests=len(tests)))
            write(f"written: {path}")
        if books.earlier is not None:
            write(f"earlier results: {books.earlier}")
        write(f"\ntarget {run.target.kind} ({run.target.device}), {seconds:.0f} s")


def _why_skipped(report: pytest.TestReport) -> str:
    """The reason of a skipped test, as it was given; empty of another."""
    where = report.longrepr
    return str(where[2]).removeprefix("Skipped: ") if report.skipped and isinstance(where, tuple) else ""
