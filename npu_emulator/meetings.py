"""The runtime's interface to communicators that are being made: who waits for whom, and how processes find each other.

What the waits of torch_npu are for is known to rendezvous.py; what other processes see of them is runtime/deadlocks.cpp.
"""

from __future__ import annotations

import atexit
import ctypes
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Attendee", "Meetings", "Wait"]


class Attendee(NamedTuple):
    """The process of a rank, as other processes find it."""

    process: int
    board: int
    """The descriptor of the file of its board (runtime/deadlocks.cpp)."""
    born: int
    """When the process began, in the system's ticks."""


class Wait(NamedTuple):
    """The wait of a rank for a root info, in a store of torch."""

    whose: str
    """The communicator, and this rank of it, for a person."""
    ranks: int
    root: int
    """The rank that sets the root info."""
    who: Attendee | None
    """Its process, if that is known."""
    seconds: int
    """The longest wait."""


class KnownGroups(Protocol):
    """Knows the groups of this process, by the address of their store and by their root infos, each of which has a name."""

    def ranks_of(self, root: str) -> tuple[str, Sequence[Attendee | None]] | None:
        """Return what a communicator is for, and its ranks."""

    def wait_for(self, store: int, key: str) -> Wait | None:
        """Return what a wait for a key is for; None if it is over, or of no interest."""

    def note_root(self, store: int, key: str, root: str) -> None:
        """Remember a root info of this process."""


class Meetings:
    """This process's meetings, as `Runtime.meetings`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Take the runtime's library, for calls that keep Python's GIL."""
        self._library = library
        self._callbacks: list[object] = []

    def watch(self, groups: KnownGroups) -> bool:
        """Ask `groups` about each wait for a root info from now on; return False if torch's stores cannot be watched."""
        if not self._library.emu_watch_stores():
            return False

        def find(root: bytes, purpose: int, capacity: int, ranks: int, count: int) -> int:
            found = groups.ranks_of(root.decode())
            if found is None:
                return 0
            _write_text(purpose, capacity, found[0])
            _write_numbers(ranks, [number for rank in found[1][:count] for number in rank or (0, 0, 0)])
            return 1

        def watch(store: int, key: bytes, root: bytes | None, whose: int, capacity: int, numbers: int) -> int:
            if root is not None:
                groups.note_root(store, key.decode(), root.decode())
                return 0
            wait = groups.wait_for(store, key.decode())
            if wait is None:
                return 0
            _write_text(whose, capacity, wait.whose)
            _write_numbers(numbers, [wait.ranks, wait.root, *(wait.who or (0, 0, 0)), wait.seconds])
            return 1

        number, text, address = ctypes.c_uint64, ctypes.c_char_p, ctypes.c_void_p
        finder = ctypes.CFUNCTYPE(ctypes.c_int, text, address, number, address, number)(find)
        watcher = ctypes.CFUNCTYPE(ctypes.c_int, address, text, text, address, number, address)(watch)
        for setter, function in (
            (self._library.emu_set_rank_finder, finder),
            (self._library.emu_set_store_watcher, watcher),
        ):
            self._callbacks.append(function)
            setter(function)
            atexit.register(setter, None)
        return True

    def address_of(self, write: Callable[[], object]) -> int | None:
        """Return the address of the store into which `write` writes; None if it is none of those that are watched."""
        self._library.emu_last_store.restype = ctypes.c_void_p
        self._library.emu_last_store()
        write()
        return self._library.emu_last_store()  # type: ignore[no-any-return]

    def this_process(self) -> Attendee:
        """Return how other processes find this one."""
        numbers = (ctypes.c_uint64 * 3)()
        self._library.emu_board(numbers)
        return Attendee(*numbers)

    def declare_processes(self, number: int) -> None:
        """Say how many processes the program has, at least."""
        self._library.emu_declare_processes(number)


def _write_text(address: int, capacity: int, text: str) -> None:
    written = text.encode()[: capacity - 1] + b"\0"
    ctypes.memmove(address, written, len(written))


def _write_numbers(address: int, numbers: Sequence[int]) -> None:
    ctypes.memmove(address, (ctypes.c_uint64 * len(numbers))(*numbers), 8 * len(numbers))
