"""Which graphs were captured in this process and why: the record behind "why does it recapture?"."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_KEPT = 1000


@dataclass(frozen=True)
class CaptureRecord:
    """One capture.

    Attributes:
        number: counts the captures of this process from 1.
        numbers: the sizes and scalars that the graph was captured for.
        reason: why no graph captured before would do; names the argument.
        graph: the number of the compiled graph (`GraphRecord.number`); 0 for one that has no record.
    """

    number: int
    numbers: tuple[object, ...]
    reason: str
    graph: int = 0


_records: deque[CaptureRecord] = deque(maxlen=_KEPT)
_count = itertools.count(1)
_files: dict[int, Path] = {}
_listeners: list[Callable[[CaptureRecord], object]] = []


def publish(numbers: tuple[object, ...], reason: str, graph: int = 0) -> CaptureRecord:
    """Add a capture to the record, and return what was added."""
    record = CaptureRecord(next(_count), numbers, reason, graph)
    _records.append(record)
    for tell in _listeners:
        tell(record)
    if graph in _files:
        with _files[graph].open("a", encoding="utf-8") as file:
            file.write(f"capture {record.number}: because of {reason}; sizes and scalars {numbers}\n")
    return record


def also_write(graph: int, path: Path) -> None:
    """From now on append each capture of the graph to a file, beside the graph's dumps."""
    _files[graph] = path


@contextmanager
def listening(tell: Callable[[CaptureRecord], object]) -> Iterator[None]:
    """In the block call ``tell`` with each capture, right after it was made."""
    _listeners.append(tell)
    try:
        yield
    finally:
        _listeners.remove(tell)


def captures_so_far() -> int:
    """How many graphs this process has captured: a mark for ``capture_records(after=...)``."""
    return _records[-1].number if _records else 0


def capture_records(*, after: int = 0, graph: int | None = None) -> tuple[CaptureRecord, ...]:
    """The captures numbered above ``after``, of one graph or of all, oldest first; the latest 1000 are kept."""
    return tuple(record for record in _records if record.number > after and graph in (None, record.graph))
