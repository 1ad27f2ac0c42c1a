"""The books of a run: every example, every finished test; kept in files as it goes, so that a run can be resumed.

``cases.jsonl`` has one line an example, ``tests.jsonl`` one line a finished test, the first line says which run it is. Lines
come as tests end; when a run ends they are put in order of their tests, so that two runs can be compared. A file that is
rewritten is replaced as a whole: a process that is killed leaves the old one or the new one.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from npugraph_ex_conformance.folders import FolderError, put_aside, write_whole


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
        eager_ulp: distance of eager mode's value, at the element of ``worst_ulp``.
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
    eager_ulp: float = 0.0


@dataclass(frozen=True)
class Failure:
    """What is known of a failure once it was made small.

    Attributes:
        message: what went wrong, with the worst element.
        guilty: the pass, and the rule and match in it, that did it.
        operators: how many the smallest failing program has.
        source: that program.
        script: the file that reproduces it, as seen from the report folder.
    """

    message: str
    guilty: str
    operators: int
    source: str
    script: str


@dataclass(frozen=True)
class Finished:
    """One test that has ended: its id, outcome and seconds, why it failed or was skipped, the tables of models it added."""

    test: str
    outcome: str
    seconds: float
    text: str = ""
    models: tuple[dict[str, Any], ...] = ()
    failure: Failure | None = None


@dataclass(frozen=True)
class Slowest:
    """The example that took longest on the device: seconds, program, and the modelled spans of one call, as in `Span`."""

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
        finished: tests that are done; in a resumed run also those that did not pass before, until they are run again.
        slowest: known once a process has ended, resumed ones included.
        earlier: where results that were in the folder were put.
        is_open: whether the files are written: from the first test on.
    """

    folder: Path | None
    run: dict[str, Any]
    entries: list[Entry] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    slowest: Slowest | None = None
    earlier: Path | None = None
    is_open: bool = False
    _before: set[str] = field(default_factory=set)
    """Tests whose result is the resumed run's."""
    _cases_before: set[str] = field(default_factory=set)
    """Tests whose examples are the resumed run's."""
    _is_resumed: bool = False

    def read(self) -> None:
        """Take over the results of the run that is resumed.

        Raises:
            FolderError: the files are another run's, or damaged.
        """
        if self.folder is None:
            return
        before, *tests = _parsed(self.folder / "tests.jsonl") or [{}]
        now = json.loads(json.dumps(self.run))
        if before != now:
            raise FolderError(
                f"{self.folder} holds another run's results: {_differences(before, now)}. "
                "Resume with the same settings; or start a new run: without --resume, which keeps the old results in "
                "its folder `earlier`, or with another --report-dir."
            )
        try:
            done = [Finished(**{**test, "models": tuple(test["models"])}) for test in tests]
            self.entries = [entry_of(case) for case in _parsed(self.folder / "cases.jsonl")]
            for line in _parsed(self.folder / "slowest.json"):
                self.slowest = Slowest(**line)
        except (TypeError, KeyError) as error:
            raise FolderError(
                f"{self.folder} holds results that this version cannot read ({error}); start without --resume."
            ) from error
        for test in done:
            self._keep(test)
        self._is_resumed = True
        self._before = {test.test for test in self.finished}
        self._cases_before = set(self._before)
        self.entries = [entry for entry in self.entries if entry.test in self._before]

    def start(self) -> None:
        """Begin to write. Called when the first test is about to run, so that a run without any changes nothing.

        Results of another run are put aside first; so is a copy of failures that this run may turn into something else.
        """
        if self.folder is None or self.is_open:
            return
        if not self._is_resumed or self.failed:
            self.earlier = put_aside(self.folder, copy=self._is_resumed)
        self.is_open = True
        self._write_all()

    def close(self) -> None:
        """Put everything in order of the tests' ids, in which it does not matter when, or in which process, each ran."""
        self.entries.sort(key=lambda entry: entry.test)
        self.finished.sort(key=lambda test: test.test)
        self._write_all()

    def keep_slower(self, slowest: Slowest | None) -> None:
        """Remember the slowest example of a process that has ended, if it is the slowest of all."""
        if slowest is not None and (self.slowest is None or slowest.seconds > self.slowest.seconds):
            self.slowest = slowest

    @property
    def done(self) -> set[str]:
        """The ids of tests that passed."""
        return {test.test for test in self.finished if test.outcome == "passed"}

    @property
    def failed(self) -> set[str]:
        """The ids of tests that failed, and of those that were stopped after one of their examples had failed."""
        tests = {test.test for test in self.finished}
        unfinished = {entry.test for entry in self.entries if entry.failures and entry.test not in tests}
        return unfinished | {test.test for test in self.finished if test.outcome == "failed"}

    def add(self, entry: Entry) -> None:
        """Enter an example; the first of a test that is run again takes the place of what it had drawn before."""
        if entry.test in self._cases_before:
            self._forget_cases(entry.test)
        self.entries.append(entry)
        self._append("cases.jsonl", entry)

    def finish(self, test: Finished) -> None:
        """Enter a test that has ended, in place of its result before."""
        if test.test in self._cases_before:
            self._forget_cases(test.test)
        if self._keep(test):
            self._write_tests()
        else:
            self._append("tests.jsonl", test)

    def _keep(self, test: Finished) -> bool:
        """Add a result, and answer whether it is not the test's first: what comes after a test may fail as well."""
        same = [other for other in self.finished if other.test == test.test]
        self.finished = [other for other in self.finished if other.test != test.test]
        if same and test.test not in self._before:
            (first,) = same
            outcome = first.outcome if first.outcome == "failed" else test.outcome
            text = "\n\n".join(filter(None, (first.text, test.text)))
            test = replace(first, outcome=outcome, seconds=first.seconds + test.seconds, text=text)
        self._before.discard(test.test)
        self.finished.append(test)
        return bool(same)

    def _forget_cases(self, test: str) -> None:
        self._cases_before.discard(test)
        left = [entry for entry in self.entries if entry.test != test]
        if len(left) < len(self.entries):
            self.entries = left
            self._write_cases()

    def _append(self, name: str, what: Entry | Finished) -> None:
        if self.is_open and self.folder is not None:
            with (self.folder / name).open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(asdict(what)) + "\n")

    def _write_all(self) -> None:
        self._write_cases()
        self._write_tests()
        self._write("slowest.json", [] if self.slowest is None else [asdict(self.slowest)])

    def _write_cases(self) -> None:
        self._write("cases.jsonl", map(asdict, self.entries))

    def _write_tests(self) -> None:
        self._write("tests.jsonl", [self.run, *map(asdict, self.finished)])

    def _write(self, name: str, lines: Iterable[Any]) -> None:
        if self.is_open and self.folder is not None:
            write_whole(self.folder / name, "".join(json.dumps(line) + "\n" for line in lines))

    def rows(self) -> dict[tuple[str, str, str], list[Entry]]:
        """The examples of each row of the table: pattern, dtype, static or dynamic shapes."""
        rows = defaultdict(list)
        for entry in self.entries:
            rows[entry.what, entry.dtype, "dynamic" if entry.dynamic else "static"].append(entry)
        return dict(sorted(rows.items()))


def _parsed(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file; what a killed process left of its last one is none.

    Raises:
        FolderError: a line is damaged.
    """
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    found = []
    for number, line in enumerate(text[: text.rfind("\n") + 1].splitlines(), 1):
        try:
            found.append(json.loads(line))
        except ValueError as error:
            raise FolderError(
                f"{path}, line {number}, is damaged, so the run cannot be resumed; start without --resume."
            ) from error
    return found


def _differences(before: dict[str, Any], now: dict[str, Any]) -> str:
    """What differs between two runs, each fact with both its values: "seed 3 there, 4 now"."""
    facts = [
        {**{name: str(value) for name, value in run.items() if name != "target"}, **_facts(str(run.get("target", "")))}
        for run in (before, now)
    ]
    there, here = ({name: fact.get(name, "none") for name in {**facts[0], **facts[1]}} for fact in facts)
    return "; ".join(f"{name} {there[name]} there, {here[name]} now" for name in there if there[name] != here[name])


def _facts(description: str) -> dict[str, str]:
    """The lines of ``Target.describe``, by name."""
    return {name: value.strip() for name, _, value in (line.partition(" ") for line in description.splitlines())}


def entry_of(data: dict[str, Any]) -> Entry:
    """An example from plain data."""
    fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}
    return Entry(**fields)
