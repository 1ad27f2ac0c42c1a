"""Watches how torch_npu's ranks meet, so that ranks which wait for each other there are found at once.

Before the first use of a group torch_npu gives the group's ranks a root info through torch's store: rank 0 sets a key, and the
others wait for it in the store, where the runtime cannot see them. So each group gets its store in a wrapper. That says on this
process's board (runtime/deadlocks.cpp) for which rank the thread waits, and ends the wait with an error when that is of no use.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist

from npu_emulator.errors import address_of
from npu_emulator.meetings import Attendee

if TYPE_CHECKING:
    from npu_emulator.device import Runtime
    from npu_emulator.meetings import Meetings

__all__ = ["watch_rendezvous"]

_UNWATCHED = ("TORCH_HCCL_ENABLE_MONITORING", "TORCH_HCCL_DUMP_ON_TIMEOUT", "TORCH_HCCL_RANKS_PER_ROOT")
"""With one of the first two, threads of torch_npu use the store to the very end of the process, when Python has ended already; with
the last one a group has several root infos."""
_LONGEST_NAP = 0.02
"""Seconds."""


class _RootInfo(NamedTuple):
    """What a key of the store is for."""

    ranks: tuple[int, ...]
    """The ranks of the group that get a communicator. The first one sets the key."""
    purpose: str
    """Added to the group's name, for a person."""


_stores: list[_MeetingStore] = []
"""Each as long as the process, because torch_npu does not keep the Python half of a store alive."""
_places: dict[str, tuple[_MeetingStore, _RootInfo]] = {}
"""By the place in the root info, which is its text up to the first zero."""


def watch_rendezvous(runtime: Runtime) -> None:
    """Give each group of torch_npu that is made from now on a store that is watched."""
    runtime.meetings.set_finder(_ranks_at)
    known = dist.Backend._plugins.get("HCCL")  # noqa: SLF001 - torch registers a backend once, and has no public way back to it
    if known is None or any(os.environ.get(name, "0") != "0" for name in _UNWATCHED):
        return

    def create(options: Any, pg_options: Any) -> Any:
        store = _MeetingStore(options.store, options.group_rank, options.group_size, options.group_id, runtime.meetings)
        _stores.append(store)
        options.store = store
        return known.creator_fn(options, pg_options)

    dist.Backend._plugins["HCCL"] = known._replace(creator_fn=create)  # noqa: SLF001 - as above


def _ranks_at(place: str) -> tuple[str, list[Attendee | None]] | None:
    if place not in _places:
        return None
    store, info = _places[place]
    return info.purpose, [store.attendee(rank) for rank in info.ranks]


class _MeetingStore(dist.Store):  # type: ignore[misc] # torch.distributed gives its stores no types
    """A group's store. In it each rank says how others find its process."""

    def __init__(self, inner: dist.Store, rank: int, size: int, group: str, meetings: Meetings) -> None:
        super().__init__()
        self._inner = inner
        self._rank = rank
        self._size = size
        self._group = f"group_name_{group}"
        self._meetings = meetings
        self._attendees: dict[int, Attendee] = {}
        inner.set(_key_of(rank), " ".join(map(str, meetings.this_process())))

    def attendee(self, rank: int) -> Attendee | None:
        """Return the process of a rank; None if the rank has not made the group yet."""
        if rank not in self._attendees and self._inner.check([_key_of(rank)]):
            self._attendees[rank] = Attendee(*map(int, self._inner.get(_key_of(rank)).split()))
        return self._attendees.get(rank)

    def get(self, key: str) -> Any:
        """Wait for a value, and watch if it is a root info."""
        info = self._info_of(key)
        if info is not None:
            self._await(key, info)
        value = self._inner.get(key)
        self._remember(info, value)
        return value

    def set(self, key: str, value: Any) -> None:
        """Set a value."""
        self._remember(self._info_of(key), value)
        self._inner.set(key, value)

    def add(self, key: str, value: int) -> Any:
        """Add to a number."""
        return self._inner.add(key, value)

    def check(self, keys: list[str]) -> Any:
        """Tell whether all keys are set."""
        return self._inner.check(keys)

    def compare_set(self, key: str, expected_value: Any, desired_value: Any) -> Any:
        """Set a value if another one is there."""
        return self._inner.compare_set(key, expected_value, desired_value)

    def delete_key(self, key: str) -> Any:
        """Delete a key."""
        return self._inner.delete_key(key)

    def num_keys(self) -> Any:
        """Return the number of keys."""
        return self._inner.num_keys()

    def wait(self, keys: list[str], *timeout: Any) -> None:
        """Wait for keys."""
        self._inner.wait(keys, *timeout)

    def _info_of(self, key: str) -> _RootInfo | None:
        """torch_npu counts the communicators of a group, and names those for messages by their two ranks."""
        low, _, high = key.partition(":")
        if low.isdigit() and high.isdigit():
            return _RootInfo((int(low), int(high)), f" (messages between ranks {low} and {high} of {self._group})")
        return _RootInfo(tuple(range(self._size)), "") if key.isdigit() else None

    def _remember(self, info: _RootInfo | None, value: bytes) -> None:
        if info is not None:
            _places[value.partition(b"\0")[0].decode()] = self, info

    def _await(self, key: str, info: _RootInfo) -> None:
        """Wait for a root info while its rank may still set it, and no longer than the store's own limit."""
        if self._inner.check([key]):
            return
        nap, until = 0.001, time.monotonic() + self._inner.timeout.total_seconds()
        whose = f"rank {info.ranks.index(self._rank)} of {self._group}{info.purpose}"
        with self._meetings.begin(whose) as meeting:
            while not self._inner.check([key]) and time.monotonic() < until:
                code, lost = meeting.look(0, self.attendee(info.ranks[0]))
                if code and not self._inner.check([key]):
                    # Not of this package's classes: torch_npu makes the text a part of its own error.
                    raise RuntimeError(f"the communicator of {whose} was not made ({code}): {lost}\n{address_of(code)}")
                time.sleep(nap)
                nap = min(2 * nap, _LONGEST_NAP)


def _key_of(rank: int) -> str:
    return f"npu_emulator/{rank}"
