"""The runtime's interface to communicators that are being made: who waits for whom, and how processes find each other.

The waits and their watch are rendezvous.py; what other processes see of them is runtime/deadlocks.cpp.
"""

from __future__ import annotations

import atexit
import ctypes
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from typing_extensions import Self

__all__ = ["Attendee", "Meeting", "Meetings"]


class Attendee(NamedTuple):
    """The process of a rank, as other processes find it."""

    process: int
    board: int
    """The descriptor of the file of its board (runtime/deadlocks.cpp)."""
    born: int
    """When the process began, in the system's ticks."""


class Meeting:
    """A wait for a rank of a communicator that is being made, for as long as the block runs, in its thread."""

    def __init__(self, library: ctypes.CDLL, whose: str) -> None:
        self._library = library
        self._whose = whose
        self._meeting = ctypes.c_void_p()

    def __enter__(self) -> Self:
        self._library.emu_begin_meeting.restype = ctypes.c_void_p
        self._meeting = ctypes.c_void_p(self._library.emu_begin_meeting(self._whose.encode()))
        return self

    def __exit__(self, *_: object) -> None:
        self._library.emu_end_meeting(self._meeting)

    def look(self, rank: int, who: Attendee | None) -> tuple[int, str]:
        """Return the error code and what is wrong, or 0 and nothing if the rank may still come. Ask the store between two calls.

        Args:
            rank: of the communicator.
            who: its process, if that is known.
        """
        text = ctypes.create_string_buffer(8192)
        numbers = (ctypes.c_uint64 * 3)(*(who or (0, 0, 0)))
        code = self._library.emu_look_for(self._meeting, rank, numbers, text, ctypes.c_uint64(len(text)))
        return code, text.value.decode()


class Meetings:
    """This process's meetings, as `Runtime.meetings`."""

    def __init__(self, library: ctypes.CDLL, waiting: ctypes.CDLL) -> None:
        """Take the runtime's library twice: for calls that keep Python's GIL, and for those that may wait."""
        self._library = library
        self._waiting = waiting
        self._finder: object = None

    def set_finder(self, finder: Callable[[str], tuple[str, Sequence[Attendee | None]] | None]) -> None:
        """Set the function that knows the ranks of the communicator whose root info names a place, and what it is for."""

        def write(place: bytes, purpose: int, capacity: int, ranks: int, count: int) -> int:
            found = finder(place.decode())
            if found is None:
                return 0
            text = found[0].encode()[: capacity - 1]
            ctypes.memmove(purpose, text + b"\0", len(text) + 1)
            numbers = [number for rank in found[1][:count] for number in rank or (0, 0, 0)]
            ctypes.memmove(ranks, (ctypes.c_uint64 * len(numbers))(*numbers), 8 * len(numbers))
            return 1

        kind = ctypes.CFUNCTYPE(
            ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint64
        )
        self._finder = kind(write)
        self._library.emu_set_rank_finder(self._finder)
        atexit.register(self._library.emu_set_rank_finder, None)

    def this_process(self) -> Attendee:
        """Return how other processes find this one."""
        numbers = (ctypes.c_uint64 * 3)()
        self._library.emu_board(numbers)
        return Attendee(*numbers)

    def begin(self, whose: str) -> Meeting:
        """Show the other processes that this thread waits for a rank of a communicator that is being made.

        Args:
            whose: the communicator, and this rank of it, for a person.
        """
        return Meeting(self._waiting, whose)
