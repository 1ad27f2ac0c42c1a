"""The file of a campaign: a line for the plan, then a line a result, on the disk before anybody counts on it.

A line that was cut off by the end of the process is dropped when the file is opened again; its item is run again. An item that
was run twice, because the first answer was lost on its way, has the first line that arrived, and counts once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from npugraph_ex.errors import UsageError

FILE = "results.jsonl"
PASSED, SKIPPED = "passed", "skipped"
ENDED = ("crashed", "hung", "too long", "too much memory")
"""How an item may end its process."""
STATES = (PASSED, SKIPPED, "failed", *ENDED)


def refuse(path: Path, *, resume: bool) -> None:
    """Find out cheaply, before anything is started, that a campaign cannot begin or go on.

    Raises:
        UsageError: there is a campaign already, or none to resume.
    """
    if resume and not path.is_file():
        raise UsageError(f"--resume: there is no campaign in {path.parent}")
    if not resume and path.exists():
        raise UsageError(f"{path} holds a campaign; go on with it by --resume, or choose another --report-dir")


@dataclass(frozen=True)
class Row:
    """What came of one item.

    Attributes:
        kind: its kind.
        number: which one.
        state: "passed", "failed", "skipped"; "crashed", "hung", "too long", "too much memory" of one that ended its process.
        seconds: of processor time.
        message: what is wrong, or why it was skipped.
        label: what it is, where the number does not say it.
        new: what it reached first in its process.
        node: the machine.
        at: seconds since the campaign began, over all its runs.
        value: what was measured, where something was.
    """

    kind: str
    number: int
    state: str
    seconds: float = 0.0
    message: str = ""
    label: str = ""
    new: tuple[str, ...] = ()
    node: str = ""
    at: float = 0.0
    value: Any = None

    @property
    def item(self) -> str:
        """``kind/number``, and what it is."""
        return f"{self.kind}/{self.number}" + (f" {self.label}" if self.label else "")

    @property
    def is_wrong(self) -> bool:
        """Whether it neither passed nor was skipped."""
        return self.state not in {PASSED, SKIPPED}


@dataclass
class Ledger:
    """All rows of a campaign, in memory and on disk.

    Attributes:
        path: of the file.
        plan: how many items of each kind.
        settings: as ``asdict(CampaignSettings)``, with the versions.
        rows: in the order in which they came.
        notes: other lines: what was measured in each run, scripts of shrunk failures.
        done: the numbers of each kind that have a row.
        twice: how many answers came for items that had one.
    """

    path: Path
    plan: dict[str, int]
    settings: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    notes: list[dict[str, Any]] = field(default_factory=list)
    done: dict[str, set[int]] = field(default_factory=dict)
    twice: int = 0
    _file: int = -1

    def open(self, *, resume: bool) -> None:
        """Open the file; with ``resume`` take over what it has.

        Raises:
            UsageError: there is a campaign already, none to resume, or one with another plan.
        """
        head = {"plan": self.plan, "settings": self.settings}
        if resume:
            kept = self._read(head)
            self._file = os.open(self.path, os.O_RDWR)
            os.ftruncate(self._file, kept)
            os.lseek(self._file, 0, os.SEEK_END)
            return
        refuse(self.path, resume=False)
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self._write([head])

    def add(self, rows: Iterable[Row]) -> list[Row]:
        """Write the rows of items that have none yet, and wait for the disk.

        Returns:
            Those rows.
        """
        fresh = [row for row in rows if self._keep(row)]
        self._write([{name: value for name, value in asdict(row).items() if value} for row in fresh])
        return fresh

    def note(self, **line: Any) -> None:
        """Write a line that is no item's."""
        self.notes.append(line)
        self._write([line])

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    @property
    def left(self) -> int:
        """How many items have no row."""
        return sum(self.plan.values()) - len(self.rows)

    def _keep(self, row: Row) -> bool:
        numbers = self.done.setdefault(row.kind, set())
        if row.number in numbers:
            self.twice += 1
            return False
        numbers.add(row.number)
        self.rows.append(row)
        return True

    def _write(self, lines: Iterable[dict[str, Any]]) -> None:
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode()
        while text:
            text = text[os.write(self._file, text) :]
        os.fsync(self._file)

    def _row(self, found: dict[str, Any], line: int) -> Row:
        """The row of a line, which has to be that of an item of the plan."""
        try:
            row = Row(**{"state": PASSED, "number": 0, **found, "new": tuple(found.get("new", ()))})
        except TypeError as error:
            raise self._damaged(line, str(error)) from error
        if row.number not in range(self.plan.get(row.kind, 0)) or row.state not in STATES:
            raise self._damaged(line, f"there is no item {row.kind} {row.number!r} with the state {row.state!r}")
        return row

    def _damaged(self, line: int, what: str) -> UsageError:
        return UsageError(
            f"{self.path} is damaged in line {line}: {what}. Delete that line and go on by --resume; its item runs again"
        )

    def _read(self, head: dict[str, Any]) -> int:
        """Take over the rows; how many bytes of the file are whole lines."""
        refuse(self.path, resume=True)
        kept = 0
        for position, line in enumerate(self.path.read_bytes().splitlines(keepends=True)):
            if not line.endswith(b"\n"):
                break
            try:
                found = json.loads(line)
            except ValueError as error:
                raise self._damaged(position + 1, str(error)) from error
            if position == 0:
                apart = _differences(found, json.loads(json.dumps(head)))
                if apart:
                    raise UsageError(f"{self.path} holds another campaign: {'; '.join(apart)}")
            elif "kind" in found:
                self._keep(self._row(found, position + 1))
            else:
                self.notes.append(found)
            kept += len(line)
        if not kept:
            raise UsageError(f"--resume: {self.path} is empty; start without --resume after deleting it")
        return kept


def _differences(known: dict[str, Any], asked: dict[str, Any]) -> list[str]:
    """What decides the answers of a campaign and is not the same: ``nice`` decides none."""
    return [
        f"its {name} is {known.get(part, {}).get(name)!r}, here {asked[part].get(name)!r}"
        for part in asked
        for name in {**known.get(part, {}), **asked[part]}
        if name != "nice" and known.get(part, {}).get(name) != asked[part].get(name)
    ]
