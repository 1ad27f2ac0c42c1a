"""Failures that are known and reported elsewhere: a file of test ids, each with the link of the report.

A line is an id, or the beginning of one, a link, and a remark: ``test_models.py::test_x  https://...  waits for ...``.
Empty lines and lines that begin with ``#`` are skipped.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Known:
    """One line of the file."""

    test: str
    link: str
    remark: str


class KnownFailuresError(Exception):
    """The file is missing or a line of it is wrong; the message says which."""


def read(path: Path) -> list[Known]:
    """The known failures of a file.

    Raises:
        KnownFailuresError: there is no such file, or a line has no link.
    """
    if not path.is_file():
        raise KnownFailuresError(f"--xfails-file: there is no file {str(path)!r}.")
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) < 2 or not words[1].startswith(("https://", "http://")):
            raise KnownFailuresError(
                f"{path}:{number}: every known failure needs the link of its report after the test's id: {line.strip()!r}."
            )
        found.append(Known(words[0], words[1], " ".join(words[2:])))
    return found


def mark(known: list[Known], items: list[pytest.Item]) -> None:
    """Expect the failures; one that passes fails the run, because the file is then out of date.

    Raises:
        KnownFailuresError: an entry names no test of this run.
    """
    for entry in known:
        hit = [item for item in items if _name(item).startswith(entry.test)]
        if not hit:
            raise KnownFailuresError(f"--xfails-file: no test is called {entry.test!r}; take the entry out.")
        for item in hit:
            item.add_marker(pytest.mark.xfail(reason=f"{entry.link} {entry.remark}".strip(), strict=True))


def _name(item: pytest.Item) -> str:
    return item.nodeid.rpartition("/")[2]
