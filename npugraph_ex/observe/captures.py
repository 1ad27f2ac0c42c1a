"""Which graphs were captured in this process and why: the record behind "why does it recapture?"."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

_KEPT = 1000
_records: deque[CaptureRecord] = deque(maxlen=_KEPT)


@dataclass(frozen=True)
class CaptureRecord:
    """One capture.

    Attributes:
        numbers: the sizes and scalars that the graph was captured for.
        reason: why no graph captured before would do; names the argument.
    """

    numbers: tuple[object, ...]
    reason: str


def publish(record: CaptureRecord) -> None:
    """Add a capture to the record."""
    _records.append(record)


def capture_records() -> tuple[CaptureRecord, ...]:
    """The latest captures of this process, oldest first (at most the last 1000)."""
    return tuple(_records)
