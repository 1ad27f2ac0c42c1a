"""Runs a folder of tests with pytest, as `conformance` and `bench` do: exit statuses, interrupts, what has to be installed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, redirect_stdout
from importlib.util import find_spec
from typing import TYPE_CHECKING

from npugraph_ex.console.interrupts import end_children, interruptible
from npugraph_ex.console.progress import Progressed, uncaptured_progress
from npugraph_ex.errors import UsageError
from npugraph_ex.observe.installing import install_command

if TYPE_CHECKING:
    import pytest


def require(who: str, needed: Mapping[str, str], extra: str) -> None:
    """Make sure that packages are installed.

    Args:
        who: what needs them, for the message.
        needed: the package's name, by the module that is imported.
        extra: of this package, that installs them.

    Raises:
        UsageError: some are not; the message has the command that installs them.
    """
    missing = [name for module, name in needed.items() if find_spec(module) is None]
    if missing:
        raise UsageError(f"{who} {', '.join(missing)}: {install_command(extra)}")


class HowFar:
    """A plugin of pytest: in place of dots, how many tests are done, and on a terminal how long the others may take."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._block = ExitStack()
        self._reached: Progressed | None = None
        self._done = 0

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """The number of tests is known."""
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.showfspath = False
        self._reached = self._block.enter_context(uncaptured_progress(len(session.items), quiet=self._quiet))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A test begins."""
        self._tell(nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """A test has ended."""
        self._done += 1
        self._tell(nodeid)

    def _tell(self, nodeid: str) -> None:
        if self._reached is not None:
            self._reached(self._done, nodeid.rpartition("::")[2])

    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """No dots."""
        return (report.outcome, "", report.outcome.upper()) if report.when == "call" or not report.passed else None

    def pytest_sessionfinish(self) -> None:
        """The bar goes before what pytest prints at the end."""
        self._block.close()


def run_pytest(
    words: Sequence[str], arguments: argparse.Namespace, *, plugins: Sequence[object] = (), after_stop: str = ""
) -> int:
    """Run pytest in this process; with `--json` all that it prints goes to stderr.

    Args:
        words: pytest's.
        arguments: of the command.
        plugins: of pytest.
        after_stop: how to go on after Ctrl-C, for a command that can.

    Returns:
        0 when everything held, 1 when something failed, 2 when nothing ran, 130 or 143 after Ctrl-C or SIGTERM: pytest's
        seven statuses are its own affair.
    """
    words = [*words, "--quiet"] if arguments.quiet else words
    with interruptible() as stop, redirect_stdout(sys.stderr if arguments.json else sys.stdout):
        try:
            import pytest

            sys.dont_write_bytecode = True  # the folder may be read-only
            status = pytest.main([*words], plugins=plugins)
        except KeyboardInterrupt:  # before pytest had begun to handle it
            status = 2
        if stop.number:
            end_children()
            sys.stderr.write(f"npugraph-ex: stopped by {stop}{after_stop and f'; {after_stop}'}\n")
            return stop.status
    if status == pytest.ExitCode.NO_TESTS_COLLECTED:
        sys.stderr.write("npugraph-ex: no test ran; none has a name that fits what was given\n")
    failed = {pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERNAL_ERROR}
    return 0 if status == pytest.ExitCode.OK else 1 if status in failed else 2
