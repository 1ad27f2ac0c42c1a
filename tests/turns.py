"""Which of the slow tests a run leaves to the runs of other commits."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Turn:
    """One part of the slow tests: part ``number`` modulo ``parts``. Each test is in one part, whatever else is run."""

    number: int
    parts: int

    @classmethod
    def from_words(cls, words: str) -> Turn:
        """Of ``5/4``, which is the second of four parts."""
        number, slash, parts = words.partition("/")
        if not (slash and number.isdecimal() and parts.isdecimal() and int(parts)):
            raise pytest.UsageError(
                f"--slow wants TURN/TURNS, such as 0/4 for the first of four parts, and got {words!r}"
            )
        return cls(int(number), int(parts))

    def has(self, test: str) -> bool:
        """Whether the slow test of this node id is in this part."""
        return zlib.crc32(test.encode()) % self.parts == self.number % self.parts
