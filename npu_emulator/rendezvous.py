"""Watches how torch_npu's ranks meet, so that ranks which wait for each other there are found at once.

Before the first use of a group torch_npu gives the group's ranks a root info through torch's store: its root sets a key, and the
others wait for it in the store. The runtime sees these calls (runtime/stores.cpp) and asks here what they are for: which
communicator the key belongs to, which rank sets it, and in which process that is.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist

from npu_emulator.meetings import Attendee, Wait

if TYPE_CHECKING:
    from npu_emulator.device import Runtime
    from npu_emulator.meetings import Meetings

__all__ = ["watch_rendezvous"]

_KEY = re.compile(r"(?P<number>\d+)|(?P<low>\d+):(?P<high>\d+)|\d+_scalable_root_(?P<root>\d+)")
"""torch_npu counts the communicators of a group, and names those for messages by their two ranks. With TORCH_HCCL_RANKS_PER_ROOT
each rank of that many is a root."""


class _RootInfo(NamedTuple):
    """What a key of the store is for."""

    ranks: tuple[int, ...]
    """The ranks of the group that get a communicator."""
    root: int
    """Which of them sets the key."""
    purpose: str
    """Added to the group's name, for a person."""


class _Group:
    """A group of torch_npu. In its store each rank says how others find its process."""

    def __init__(self, store: dist.Store, rank: int, size: int, name: str, meetings: Meetings) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._name = f"group_name_{name}"
        self._attendees: dict[int, Attendee] = {}
        self.address = meetings.address_of(
            lambda: store.set(_key_of(rank), " ".join(map(str, meetings.this_process())))
        )
        """Of the store in C++; None if it is of a kind that the runtime does not see."""

    def attendee(self, rank: int) -> Attendee | None:
        """Return the process of a rank; None if the rank has not made the group yet."""
        if rank not in self._attendees and self._store.check([_key_of(rank)]):
            self._attendees[rank] = Attendee(*map(int, self._store.get(_key_of(rank)).split()))
        return self._attendees.get(rank)

    def info_of(self, key: str) -> _RootInfo | None:
        """Return what a key is for; None if it is of no root info."""
        found = _KEY.fullmatch(key)
        if found is None:
            return None
        if found["low"]:
            low, high = int(found["low"]), int(found["high"])
            return _RootInfo((low, high), 0, f" (messages between ranks {low} and {high} of {self._name})")
        root = int(found["root"] or 0) * int(os.environ.get("TORCH_HCCL_RANKS_PER_ROOT", "1"))
        return _RootInfo(tuple(range(self._size)), root, "")

    def root_at(self, key: str) -> str:
        """Return the name of the root info that a key holds (`name_of_root` in runtime/meeting.cpp)."""
        value = self._store.get(key)
        return " ".join(value[at : at + 64].partition(b"\0")[0].decode() for at in (0, 64))

    def wait_for(self, key: str) -> Wait | None:
        """Return what this rank waits for until the key is set; None if it need not wait, or the key is of no root info."""
        info = self.info_of(key)
        if info is None or self._store.check([key]):
            return None
        whose = f"rank {info.ranks.index(self._rank)} of {self._name}{info.purpose}"
        seconds = int(self._store.timeout.total_seconds())
        return Wait(whose, len(info.ranks), info.root, self.attendee(info.ranks[info.root]), seconds)


class _WatchedGroups:
    """The groups of this process, as `Meetings.watch` asks for them. Each stays: torch_npu may use its store to the very end."""

    def __init__(self) -> None:
        self.by_store: dict[int, _Group] = {}
        self._roots: dict[str, tuple[_Group, _RootInfo]] = {}

    def ranks_of(self, root: str) -> tuple[str, list[Attendee | None]] | None:
        """Return what the communicator of a root info is for, and its ranks."""
        if root not in self._roots:
            return None
        group, info = self._roots[root]
        return info.purpose, [group.attendee(rank) for rank in info.ranks]

    def wait_for(self, store: int, key: str) -> Wait | None:
        """Return what a wait for a key is for; None if that is of no interest."""
        group = self.by_store.get(store)
        wait = None if group is None else group.wait_for(key)
        if group is not None and wait is None and group.info_of(key) is not None:
            self.note_root(store, key, group.root_at(key))
        return wait

    def note_root(self, store: int, key: str, root: str) -> None:
        """Remember a root info that this process gives to others, or gets from them."""
        group = self.by_store.get(store)
        if group is not None and (info := group.info_of(key)) is not None:
            self._roots[root] = group, info


def watch_rendezvous(runtime: Runtime) -> None:
    """Watch the stores of torch_npu's groups that are made from now on."""
    known = dist.Backend._plugins.get("HCCL")  # noqa: SLF001 - torch registers a backend once, and has no public way back to it
    groups = _WatchedGroups()
    if known is None or not runtime.meetings.watch(groups):
        return

    def create(options: Any, pg_options: Any) -> Any:
        runtime.meetings.declare_processes(options.group_size)
        group = _Group(options.store, options.group_rank, options.group_size, options.group_id, runtime.meetings)
        if group.address is not None:
            groups.by_store[group.address] = group
        return known.creator_fn(options, pg_options)

    dist.Backend._plugins["HCCL"] = known._replace(creator_fn=create)  # noqa: SLF001 - as above


def _key_of(rank: int) -> str:
    return f"npu_emulator/{rank}"
