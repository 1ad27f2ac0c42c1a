"""Starts the emulated device where there is no real one, finds the benches' helpers, and prints their tables at the end."""

from __future__ import annotations

import contextlib
import platform
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

import npu_emulator

sys.path.append(str(Path(__file__).parent))
with contextlib.suppress(npu_emulator.ActivationError):  # a real device is here
    npu_emulator.activate(quiet=True)

from tables import Table

_TABLE = pytest.StashKey[Table]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where the tables are kept."""
    parser.addoption("--tables", type=Path, default=Path("reports/benches.json"), help="write the tables here as JSON")


def pytest_configure(config: pytest.Config) -> None:
    """One set of tables a run."""
    config.stash[_TABLE] = Table()


@pytest.fixture
def table(request: pytest.FixtureRequest) -> Iterator[Table]:
    """Adds rows to the tables that the run ends with."""
    return request.config.stash[_TABLE]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the tables, and write them for `npugraph-ex bench` and the documentation."""
    tables = config.stash[_TABLE]
    if not tables.rows:
        return
    terminalreporter.section("benches, on the emulated device")
    terminalreporter.write_line(tables.text())
    path: Path = config.getoption("tables")
    path.parent.mkdir(parents=True, exist_ok=True)
    names = ("torch", "torch_npu", "npugraph_ex")
    tables.save(
        path, machine=platform.machine(), python=platform.python_version(), **{name: version(name) for name in names}
    )
    terminalreporter.write_line(f"\nwritten to {path}")
