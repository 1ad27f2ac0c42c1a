"""Which graphs were captured in this process and why: the record behind "why does it recapture?"."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass

_KEPT = 1000


@dataclass(frozen=True)
class CaptureRecord:
    """One capture.

    Attributes:
        number: counts the captures of this process from 1.
        numbers: the sizes and scalars that the graph was captured for.
        reason: why no graph captured before would do; names the argument.
    """

    number: int
    numbers: tuple[object, ...]
    reason: str


_records: deque[CaptureRecord] = deque(maxlen=_KEPT)
_count = itertools.count(1)


def publish(numbers: tuple[object, ...], reason: str) -> None:
    """Add a capture to the record."""
    _records.append(CaptureRecord(next(_count), numbers, reason))


def captures_so_far() -> int:
    """How many graphs this process has captured: a mark for ``capture_records(after=...)``."""
    return _records[-1].number if _records else 0


def capture_records(*, after: int = 0) -> tuple[CaptureRecord, ...]:
    """The captures numbered above ``after``, oldest first, of which the latest 1000 are kept."""
    return tuple(record for record in _records if record.number > after)
