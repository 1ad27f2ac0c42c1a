"""Starts the emulated device where there is no real one, finds the benches' helpers, and prints their tables at the end."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import pytest

import npu_emulator

sys.path.append(str(Path(__file__).parent))
with contextlib.suppress(npu_emulator.ActivationError):  # a real device is here
    npu_emulator.activate(quiet=True)

from measured_tables import Saved, Table, machine
from regressions import remember, worse

from npugraph_ex.console.interrupts import end_children

_TABLE, _WORSE = pytest.StashKey[Table](), pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where the tables are kept, and what they are compared with."""
    parser.addoption("--tables", type=Path, default=Path("reports/benches.json"), help="write the tables here as JSON")
    parser.addoption(
        "--tables-page", type=Path, help="write the tables here as a page, in Markdown or, named *.html, in HTML"
    )
    parser.addoption(
        "--tables-against", type=Path, help="print beside each figure how it was in this earlier JSON or page"
    )
    parser.addoption(
        "--tables-worse", type=float, help="fail where a ratio or a count is worse by more than so many percent"
    )
    parser.addoption("--tables-history", type=Path, help="add the tables to this file, a line of JSON a run")


def pytest_configure(config: pytest.Config) -> None:
    """One set of tables a run; an earlier one that cannot be read ends the run before it begins."""
    config.stash[_TABLE] = Table()
    against = config.getoption("tables_against")
    if against is not None:
        try:
            Saved.read(against)
        except (OSError, ValueError) as error:
            raise pytest.UsageError(f"an earlier run to compare with is a JSON file that one saved: {error}") from error


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail if a ratio or a count is worse than before."""
    config = session.config
    percent, against = config.getoption("tables_worse"), config.getoption("tables_against")
    config.stash[_WORSE] = []
    if percent is not None and against is not None:
        now = Saved(machine(), config.stash[_TABLE].rows)
        config.stash[_WORSE] = worse(now, Saved.read(against), percent)
    if config.stash[_WORSE] and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture
def table(request: pytest.FixtureRequest) -> Table:
    """Adds rows to the tables that the run ends with."""
    return request.config.stash[_TABLE]


def pytest_keyboard_interrupt() -> None:
    """The processes that answer questions end with the run."""
    end_children()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config) -> None:
    """Print the tables, and write them for `npugraph-ex bench` and the documentation.

    Those of a run that was interrupted lack rows: they do not take the place of a whole run's.
    """
    tables = config.stash[_TABLE]
    if not tables.rows:
        return
    saved = Saved(machine(), tables.rows)
    against: Path | None = config.getoption("tables_against")
    terminalreporter.section("benches")
    terminalreporter.write_line(saved.text() if against is None else saved.beside(Saved.read(against)))
    for line in config.stash[_WORSE]:
        terminalreporter.write_line(f"worse than before: {line}", red=True)
    history: Path | None = config.getoption("tables_history")
    if history is not None and exitstatus != pytest.ExitCode.INTERRUPTED:
        remember(saved, history)
    path: Path = config.getoption("tables")
    if exitstatus == pytest.ExitCode.INTERRUPTED:
        path = path.with_name(f"{path.stem}.interrupted{path.suffix}")
    path.parent.mkdir(parents=True, exist_ok=True)
    saved.write(path)
    if config.get_verbosity() >= 0:
        terminalreporter.write_line(f"\nwritten to {path}")
    page: Path | None = config.getoption("tables_page")
    if page is not None and exitstatus != pytest.ExitCode.INTERRUPTED:
        page.write_text(saved.html() if page.suffix == ".html" else saved.page(), encoding="utf-8")
        if config.get_verbosity() >= 0:
            terminalreporter.write_line(f"written to {page}")
