"""Vector clocks over streams, and the past accesses of operations.

A clock maps a stream to the number of its last operation that is known to have happened. Operation B comes after A if B's
stream knew A's number at B's launch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from npu_emulator.races.access import Access, overlap

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Clock", "Domain", "Found", "Operation", "join"]

Clock = dict[int, int]
_PAGE_BITS = 20  # past accesses are looked up by 1 MiB pages
_SETTLED_AT = 256  # accesses of a page, after which those that a later one replaces are looked for


def join(clock: Clock, other: Clock) -> None:
    """Add everything in `other` to `clock`."""
    for stream, number in other.items():
        if clock.get(stream, 0) < number:
            clock[stream] = number


@dataclass(frozen=True, eq=False)
class Operation:
    """One launched piece of work."""

    name: str
    frames: tuple[str, ...]
    stream: int
    number: int
    fresh: bool = False
    """Whether it writes to memory that was allocated for it."""


Found = Callable[[Operation, Access, Operation, Access, int], None]
"""What is called with the earlier operation and access, the later ones, and how many bytes they share."""


class Domain:
    """Clocks and past accesses of streams, or of the lanes of one captured graph, that may race with each other."""

    def __init__(self) -> None:
        self._clocks: dict[int, Clock] = {}
        self._pages: dict[int, _MemoryPage] = {}

    def clock(self, stream: int) -> Clock:
        """Return a stream's clock; the caller may change it to add knowledge."""
        return self._clocks.setdefault(stream, {})

    def everything(self) -> Clock:
        """Return the joined clocks of all streams."""
        known: Clock = {}
        for clock in self._clocks.values():
            join(known, clock)
        return known

    def next_number(self, stream: int) -> int:
        """Begin the next operation of a stream."""
        clock = self.clock(stream)
        clock[stream] = clock.get(stream, 0) + 1
        return clock[stream]

    def forget(self, start: int, end: int, known: Clock) -> None:
        """Forget the accesses between two addresses of operations that `known` has: that memory is handed out again."""
        for number in range(start >> _PAGE_BITS, (end - 1 >> _PAGE_BITS) + 1):
            if number in self._pages:
                self._pages[number].forget(start, end, known)

    def touch(
        self,
        operation: Operation,
        accesses: Iterable[Access],
        found: Found,
    ) -> None:
        """Add an operation's accesses; call `found` for each earlier access that races with one."""
        known = self.clock(operation.stream)
        for access in accesses:
            for number in range(access.start >> _PAGE_BITS, (access.end - 1 >> _PAGE_BITS) + 1):
                page = self._pages.get(number)
                if page is None:
                    page = self._pages[number] = _MemoryPage()
                page.touch(operation, access, known, found)


class _MemoryPage:
    """The past accesses of a page, without those of which a later one has all races.

    Most accesses come after all that the page has seen. They are in `_recent`, and compared with others only when one comes
    that does not: a program of one stream compares nothing.
    """

    __slots__ = ("_newest", "_past", "_recent")

    def __init__(self) -> None:
        self._newest: Clock = {}
        self._past: list[tuple[Access, Operation]] = []
        self._recent: dict[Access, Operation] = {}

    def touch(
        self,
        operation: Operation,
        access: Access,
        known: Clock,
        found: Found,
    ) -> None:
        """Add an access of an operation whose stream knows `known`; call `found` for each earlier one that races with it."""
        for stream, number in self._newest.items():
            if known.get(stream, 0) < number:
                self._settle()
                self._compare(operation, access, known, found)
                break
        else:
            self._recent.pop(access, None)
            self._recent[access] = operation
            if len(self._recent) > _SETTLED_AT:
                self._settle()
        self._newest[operation.stream] = operation.number

    def forget(self, start: int, end: int, known: Clock) -> None:
        """As `Domain.forget`, in this page."""
        self._settle()
        self._past = [
            (access, who)
            for access, who in self._past
            if access.end <= start or access.start >= end or known.get(who.stream, 0) < who.number
        ]

    def _settle(self) -> None:
        """Move the recent accesses to the others: each comes after all that are there."""
        for access, operation in self._recent.items():
            self._past = [entry for entry in self._past if not _replaces(access, entry[0])]
            self._past.append((access, operation))
        self._recent.clear()

    def _compare(
        self,
        operation: Operation,
        access: Access,
        known: Clock,
        found: Found,
    ) -> None:
        kept = []
        for earlier, who in self._past:
            ordered = known.get(who.stream, 0) >= who.number
            if not ordered and (access.writes or earlier.writes):
                shared = overlap(earlier, access)
                if shared:
                    found(who, earlier, operation, access, shared)
            if not (ordered and _replaces(access, earlier)):
                kept.append((earlier, who))
        self._past = [*kept, (access, operation)]


def _replaces(later: Access, earlier: Access) -> bool:
    """Tell whether every race with `earlier` is also one with `later`, so that only the later need be kept."""
    if earlier.writes and not later.writes:
        return False
    same = later[:5] == earlier[:5]
    return same or (later.start <= earlier.start and earlier.end <= later.end and later.is_dense)
