"""Which unit tests notice the faults that no example of the suite does.

Run it in a clone that nobody else uses: each fault is written into the clone's files while its tests run there, so that the
programs which a test starts have the fault, too. The tests of a fault are those that run its statement, by what
``pytest --cov --cov-context=test`` has written. Those come first that run lines of its function which few others run, then those
that run the fewest lines of all, because they ask most closely.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import npu_emulator
from npugraph_ex_conformance.mutation import table
from npugraph_ex_conformance.mutation.arguments import arguments, identity_of
from npugraph_ex_conformance.mutation.sites import FaultSite, lines_of, lines_of_function, sites, source_with
from npugraph_ex_conformance.words import words

_TESTS = 40
"""So many tests at most look for a fault."""
_SECONDS = 300
"""Of processor time for the tests of a fault; one that takes more is noticed by that."""
_WAITING = 3600
"""Seconds of wall time after which tests that use no processor are ended: a fault can make them wait for each other."""
_ENVIRONMENT = {**os.environ, "COLUMNS": "10000", "PYTHONDONTWRITEBYTECODE": "1"}
"""Of the tests: without what the emulated device of this process adds. Bytecode of a fault must not outlive the fault."""
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+\.py.*?)(?: - .*)?$", re.MULTILINE)


class TestsOfLines:
    """The unit tests that run each line of the library.

    Args:
        coverage_file: of a run of the tests with ``--cov-context=test``.
    """

    def __init__(self, coverage_file: Path) -> None:
        from coverage import CoverageData

        data = CoverageData(basename=str(coverage_file))
        data.read()
        self._lines = {file: _tests_by_line(data.contexts_by_lineno(file)) for file in data.measured_files()}
        self._size = Counter(test for of_file in self._lines.values() for tests in of_file.values() for test in tests)

    def of(self, site: FaultSite) -> list[str]:
        """The tests that run the statement of a fault, the closest first, not more than `_TESTS`."""
        ending = str(Path(*site.module.split(".")).with_suffix(".py"))
        lines = next((of for file, of in self._lines.items() if file.endswith(ending)), {})
        found = {test for line in lines_of(site) for test in lines.get(line, ())}
        rare = Counter[str]()
        for line in lines_of_function(site):
            tests = lines.get(line, ())
            rare.update(dict.fromkeys(tests, 1 / max(len(tests), 1)))
        return sorted(found, key=lambda test: (-round(rare[test], 9), self._size[test], test))[:_TESTS]


def _tests_by_line(contexts: Mapping[int, Iterable[str]]) -> dict[int, set[str]]:
    """The tests of each line; a context is a test and, after a bar, which of its phases."""
    return {line: {context.rpartition("|")[0] for context in of_line if context} for line, of_line in contexts.items()}


@contextmanager
def written(site: FaultSite) -> Iterator[None]:
    """The fault in the file of its module, for the length of a block."""
    file = Path(str(import_module(site.module).__file__))
    before = file.read_text(encoding="utf-8")
    file.write_text(source_with(site), encoding="utf-8")
    try:
        yield
    finally:
        file.write_text(before, encoding="utf-8")


def failing(tests: Sequence[str]) -> str:
    """The first of some tests that fails in a process of its own, or how the process ends; empty where all pass."""
    if not tests:
        return ""
    limited = ["bash", "-c", f'ulimit -t {_SECONDS} && exec "$@"', "bash"]
    command = [
        *limited,
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-rfE",
        "--no-header",
        "-p",
        "no:cacheprovider",
        *tests,
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=_ENVIRONMENT,
        start_new_session=True,
    ) as running:  # fmt: skip
        try:
            text, _ = running.communicate(timeout=_WAITING)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)
            return "the tests wait without end"
    if running.returncode == 0:
        return ""
    named = _FAILED.search(text)
    return named[1] if named else f"pytest ends with {running.returncode}"


def noticed(site: FaultSite, tests: Iterable[str]) -> tuple[str, int]:
    """Which test fails because of a fault, and how many looked. One that fails without the fault, too, does not count."""
    left = list(tests)
    while left:
        with written(site):
            said = failing(left)
        if said not in left:  # all pass, or the process ends as it does not without the fault
            return ("" if said and failing(left) else said), len(left)
        if not failing([said]):
            return said, len(left)
        left.remove(said)
    return "", 0


def main(results: str, coverage_file: str, to: str) -> None:
    """Look for each fault of a campaign that no example noticed and nobody argued; a second run looks for the rest alone."""
    npu_emulator.activate(quiet=True)  # some modules are imported beside a device only
    argued, tests_of, out = arguments(), TestsOfLines(Path(coverage_file)), Path(to)
    known = {tuple(row["fault"]) for row in table.answers_of(out)} if out.exists() else set()
    rows = [row for row in table.read(Path(results)) if not row["value"]["by"] and identity_of(row) not in argued]
    left = [row for row in rows if tuple(row["value"]["fault"]) not in known]
    with out.open("a", encoding="utf-8", buffering=1) as file:
        for number, row in enumerate(left, 1):
            identity = identity_of(row)
            site = next(site for site in sites(identity.module) if site.identity == identity)
            by, count = noticed(site, tests_of.of(site))
            file.write(json.dumps({"fault": [*identity], "tests": count, "by": by}) + "\n")
            print(f"{number}/{len(left)} {site.name}: {by or ('survives' if count else 'no test runs it')}", flush=True)


if __name__ == "__main__":
    main(
        *words(
            "npugraph_ex_conformance.mutation.unit_tests", __doc__,
            ("results", "the results.jsonl of a campaign of systematic-mutants"),
            ("coverage", "the file that pytest --cov --cov-context=test has written in this clone"),
            ("to", "the file for the answers; those that it has are kept"),
        )
    )  # fmt: skip
