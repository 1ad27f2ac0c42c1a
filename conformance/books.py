"""The books of a run: every example, every finished test; kept in files as it goes, so that a run can be resumed.

``cases.jsonl`` has one line an example, ``tests.jsonl`` one line a finished test, the first line says which run it is. Lines
come as tests end; when a run ends they are put in order of their tests, so that two runs can be compared.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


class OtherRunError(Exception):
    """The folder holds the books of a run that is not this one, so there is nothing to resume."""


@dataclass(frozen=True)
class Entry:
    """One example.

    Attributes:
        test: the id of the test that drew it.
        what: the row of the table that it counts for.
        dtype: of the planted pattern.
        dynamic: whether it was compiled for symbolic shapes.
        near_miss: what kept the pattern from being fused; None where it had to fuse.
        route: as in ``Case``; "streams" or "shared pool" of programs that are no case.
        seconds: of processor time that it took.
        fusions: that happened.
        expected: that had to happen, None for any number.
        worst_ulp: distance from the float64 reference.
        reasons: of the pass report's near-misses.
        failures: what went wrong.
        source: the program.
        passes: those that changed its graph.
        kind: which line of the table of rates it counts for.
    """

    test: str
    what: str
    dtype: str
    dynamic: bool
    near_miss: str | None
    route: str
    seconds: float
    fusions: int
    expected: int | None
    worst_ulp: float
    reasons: tuple[str, ...]
    failures: tuple[str, ...]
    source: str
    passes: tuple[str, ...] = ()
    kind: str = ""


@dataclass(frozen=True)
class Failure:
    """What is known of a failure once it was made small.

    Attributes:
        message: what went wrong, with the worst element.
        guilty: the pass, and the rule and match in it, that did it.
        operators: how many the smallest failing program has.
        source: that program.
        script: the file that reproduces it.
    """

    message: str
    guilty: str
    operators: int
    source: str
    script: str


@dataclass(frozen=True)
class Finished:
    """One test that has ended: its id, outcome and seconds, the tables of models that it added, and why it failed."""

    test: str
    outcome: str
    seconds: float
    text: str = ""
    models: tuple[dict[str, Any], ...] = ()
    failure: Failure | None = None


@dataclass(frozen=True)
class Slowest:
    """The example that took longest on the device: seconds, program, and the modelled spans of one call as ``Work``."""

    seconds: float
    source: str
    eager: tuple[dict[str, Any], ...]
    replayed: tuple[dict[str, Any], ...]


@dataclass
class Books:
    """What has happened so far, in memory and, with a folder, on disk.

    Attributes:
        folder: where the files are; None for memory alone.
        run: what makes the run this one: target, versions, profile, seed.
        entries: examples of tests that are done or under way.
        finished: tests that are done.
        slowest: known once a process has ended, resumed ones included.
    """

    folder: Path | None
    run: dict[str, Any]
    entries: list[Entry] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    slowest: Slowest | None = None

    def open(self, *, resume: bool) -> None:
        """Start new files, or read what is there and forget the tests that did not end well.

        Raises:
            OtherRunError: the files are another run's.
        """
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        if resume and _lines(self.folder / "tests.jsonl"):
            self._read(self.folder)
        self._write_all(self.folder)

    def _read(self, folder: Path) -> None:
        before, *read = map(json.loads, _lines(folder / "tests.jsonl"))
        if before != json.loads(json.dumps(self.run)):
            changed = sorted(
                key for key in {*before, *self.run} if before.get(key) != json.loads(json.dumps(self.run)).get(key)
            )
            raise OtherRunError(
                f"{folder} holds another run's results: {', '.join(changed)} differ. Start without --resume, or elsewhere."
            )
        failed = {test["test"] for test in read if test["outcome"] != "passed"}
        passed = [test for test in read if test["test"] not in failed]
        self.finished = [Finished(**{**test, "models": tuple(test["models"])}) for test in passed]
        done = {test.test for test in self.finished}
        cases = map(json.loads, _lines(folder / "cases.jsonl"))
        self.entries = [entry_of(case) for case in cases if case["test"] in done]
        for line in _lines(folder / "slowest.json"):
            self.slowest = Slowest(**json.loads(line))

    def _write_all(self, folder: Path) -> None:
        tests = [json.dumps(self.run), *(json.dumps(asdict(test)) for test in self.finished)]
        (folder / "tests.jsonl").write_text("\n".join(tests) + "\n", encoding="utf-8")
        cases = [json.dumps(asdict(entry)) + "\n" for entry in self.entries]
        (folder / "cases.jsonl").write_text("".join(cases), encoding="utf-8")
        slowest = "" if self.slowest is None else json.dumps(asdict(self.slowest)) + "\n"
        (folder / "slowest.json").write_text(slowest, encoding="utf-8")

    def close(self) -> None:
        """Put everything in order of the tests' ids, in which it does not matter when, or in which process, each ran."""
        self.entries.sort(key=lambda entry: entry.test)
        self.finished.sort(key=lambda test: test.test)
        if self.folder is not None:
            self._write_all(self.folder)

    def keep_slower(self, slowest: Slowest | None) -> None:
        """Remember the slowest example of a process that has ended, if it is the slowest of all."""
        if slowest is not None and (self.slowest is None or slowest.seconds > self.slowest.seconds):
            self.slowest = slowest

    @property
    def done(self) -> set[str]:
        """The ids of tests that passed in the run that is resumed."""
        return {test.test for test in self.finished if test.outcome == "passed"}

    def add(self, entry: Entry) -> None:
        """Enter an example."""
        self.entries.append(entry)
        self._append("cases.jsonl", entry)

    def finish(self, test: Finished) -> None:
        """Enter a test that has ended."""
        self.finished.append(test)
        self._append("tests.jsonl", test)

    def _append(self, name: str, what: Entry | Finished) -> None:
        if self.folder is not None:
            with (self.folder / name).open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(asdict(what)) + "\n")

    def rows(self) -> dict[tuple[str, str, str], list[Entry]]:
        """The examples of each row of the table: pattern, dtype, static or dynamic shapes."""
        rows = defaultdict(list)
        for entry in self.entries:
            rows[entry.what, entry.dtype, "dynamic" if entry.dynamic else "static"].append(entry)
        return dict(sorted(rows.items()))


def _lines(path: Path) -> list[str]:
    """The whole lines of a file; what a killed process left of its last one is none."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return text[: text.rfind("\n") + 1].splitlines()


def entry_of(data: dict[str, Any]) -> Entry:
    """An example from plain data."""
    return Entry(**{name: tuple(value) if isinstance(value, list) else value for name, value in data.items()})
