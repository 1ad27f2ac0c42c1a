"""What a person sees: the target first, progress, the tables at the end. A pytest plugin; decides nothing."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
from tabulate import tabulate

if TYPE_CHECKING:
    from running import Run


class Reporter:
    """Prints for one run. On a terminal a bar counts examples; elsewhere each test is one line."""

    def __init__(self, run: Run, config: pytest.Config) -> None:
        self._run = run
        self._config = config
        self._start = time.monotonic()
        self._progress: Any = None

    def pytest_report_header(self) -> list[str]:
        """Target, versions and seed, before anything else."""
        from npugraph_ex.testing import Limits

        lines = self._run.target.describe(seed=self._run.seed).splitlines()
        lines.append(f"{'judge':<12} {Limits()}")
        return [*lines, *([f"{'mutant':<12} {self._run.mutant} (this run must fail)"] if self._run.mutant else [])]

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Start the bar, if there is somebody to look at it."""
        self._config.pluginmanager.get_plugin("terminalreporter").showfspath = False
        writer = self._config.get_terminal_writer()
        if not writer.hasmarkup or self._config.option.verbose:
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=Console(file=writer._file, force_terminal=True), transient=True)
        self._task = self._progress.add_task("tests", total=len(session.items))
        self._run.on_example = lambda: self._progress.update(self._task, description=f"{self._run.checked} programs")
        self._progress.start()

    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """No dots: the bar or the lines say it."""
        if report.when == "call" and report.passed:
            return "passed", "", "PASSED"
        return None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One test is done."""
        if report.when != "call" and not (report.when == "setup" and report.failed):
            return
        if self._progress is not None:
            self._progress.advance(self._task)
            return
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        verdict = "ok" if report.passed else "skipped" if report.skipped else "WRONG"
        name = report.nodeid.split("::", 1)[-1]
        reporter.write_line(f"{verdict:<8}{report.duration:6.1f} s  {self._run.checked:5d} programs  {name}")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """The tables."""
        if self._progress is not None:
            self._progress.stop()
        run = self._run
        write = terminalreporter.write_line
        if run.rows:
            terminalreporter.section("patterns and capture")
            write(self._patterns())
            rate = run.checked / run.seconds if run.seconds else 0.0
            write(f"\n{run.checked} programs, {rate:.1f} a second, on {run.target.device}, seed {run.seed}")
        for model in run.models:
            terminalreporter.section(f"model: {model['name']}")
            write(tabulate(model["rows"], headers=model["headers"], tablefmt="simple"))
            write(f"\n{model['note']}")
        write(f"\ntarget {run.target.kind} ({run.target.device}), {time.monotonic() - self._start:.0f} s")

    def _patterns(self) -> str:
        rows = [
            (
                *key, row.cases, row.fused, row.refused, f"{row.worst_ulp:.2f}" if row.worst_ulp else "equal",
                f"{row.failed} WRONG" if row.failed else "right",
            )
            for key, row in sorted(self._run.rows.items())
        ]  # fmt: skip
        headers = ("pattern", "dtype", "shapes", "cases", "fused", "near-misses refused", "worst ULP", "verdict")
        return tabulate(rows, headers=headers, tablefmt="simple", disable_numparse=True)
