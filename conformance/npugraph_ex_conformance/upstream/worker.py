"""A plugin of pytest in the process that runs one file of another project: limits it, and writes each outcome as it ends.

Its order is a JSON object:

=========== ===========================================================================
file        the test file
tests       the folder of tests, which test files may import from
place       the folder to run in
output      where what is printed goes
processor   the most seconds of processor time that the process may take
only        the tests to run; null for all
without     tests to leave out: those that an earlier process of the same file did
answers     where each line goes: ``{"started": test}``, ``{"test", "state", "kind", "message", "line"}``
=========== ===========================================================================
"""

from __future__ import annotations

import inspect
import json
import random
import re
import resource
import sys
import unittest
from pathlib import Path
from typing import Any

import pytest
import torch
from _pytest.unittest import TestCaseFunction

_SEED = 0
_OF_A_CHILD = re.compile(
    r"(?:Process|Thread) \d+ (?:exited|terminated) with .*:\n(?:.*\n)*?"
    r"(?P<trace>Traceback.*\n(?: .*\n)*)(?P<kind>[\w.]+)(?:: )?(?P<said>[^\0]*)"
)
"""What torch's test classes and `torch.multiprocessing` say for a process or thread that a test started."""


def in_child(message: str, file: str) -> tuple[str, str, int] | None:
    """Class and message of the exception in the first child that failed, and its line of ``file``; None where no child failed."""
    found = _OF_A_CHILD.search(message)
    if found is None:
        return None
    lines = re.findall(rf'File "{re.escape(file)}", line (\d+)', found["trace"])
    return found["kind"].rpartition(".")[2], found["said"], int(lines[-1]) if lines else 0


def _short(item_or_report: Any) -> str:
    """``Class::test`` without the file."""
    return str(item_or_report.nodeid).partition("::")[2]


class Worker:
    """The hooks."""

    def __init__(self, order: dict[str, Any]) -> None:
        """Take the order, and limit this process."""
        self._order = order
        self._answers = Path(order["answers"]).open("a", encoding="utf-8")  # noqa: SIM115 - open as long as the process lives
        self._done: set[str] = set()
        # pytest makes each class once with this name, and some look the name up; unittest's own runner never does.
        unittest.TestCase.runTest = lambda _: None  # type: ignore[attr-defined]
        seconds = int(order["processor"])
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def _write(self, **line: Any) -> None:
        self._answers.write(json.dumps(line) + "\n")
        self._answers.flush()

    def pytest_pycollect_makeitem(self, obj: object) -> list[pytest.Item] | None:
        """Take no generator for a test: pytest would refuse the whole file, and unittest's own runner never calls it."""
        return [] if inspect.isgeneratorfunction(obj) else None

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leave out what is not asked for, and in a file of unittest what is in no class: helpers, whatever their names.

        Classes run in the order of their names, as unittest's own runner takes them: some files depend on it.
        """
        only, without = self._order["only"], {*self._order["without"]}
        cases: list[pytest.Item] = [
            item for item in items if isinstance(item, TestCaseFunction) and item.name != "runTest"
        ]
        cases.sort(key=lambda item: _short(item).partition("::")[0])
        kept = [
            item for item in cases or items if _short(item) not in without and (only is None or _short(item) in only)
        ]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Write that the file cannot be imported, or skips itself as a whole."""
        if report.failed:
            text = str(report.longrepr)
            last = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
            kind, _, message = (last[0] if last else text).partition(":")
            self._write(test="", state="failed", kind=kind.rpartition(".")[2], message=message.strip() or text[-300:])
        elif report.skipped and isinstance(report.longrepr, tuple):
            self._write(test="", state="skipped", kind="", message=report.longrepr[2].removeprefix("Skipped: "))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        """Let a test draw the same numbers in every run, whichever tests ran before it: a verdict may depend on them."""
        random.seed(_SEED)
        torch.default_generator.manual_seed(_SEED)
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed(_SEED)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Write which test begins, so that one that ends the process is known."""
        self._write(started=nodeid.partition("::")[2])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
        """Write the outcome of a test once."""
        report = yield
        test = _short(item)
        if test in self._done or not (report.when == "call" or report.failed or report.skipped):
            return report
        self._done.add(test)
        kind, message, state, line = "", "", report.outcome, 0
        if report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            message = getattr(report, "wasxfail", "") or reason.removeprefix("Skipped: ")
        elif report.failed and call.excinfo is not None:
            kind, message = call.excinfo.type.__name__, str(call.excinfo.value)
            own = [entry.lineno + 1 for entry in call.excinfo.traceback if str(entry.path) == self._order["file"]]
            line = own[-1] if own else 0
            kind, message, line = in_child(message, self._order["file"]) or (kind, message, line)
        self._write(test=test, state=state, kind=kind, message=message[:2000], line=line)
        return report
