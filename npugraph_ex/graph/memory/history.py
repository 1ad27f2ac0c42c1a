"""The accesses to one memory in the order of the graph, found by the bytes that they touch.

Most memory has few accesses, and a look at each is fastest. A buffer with thousands of slices has many. For it there is a
tree over time: each branch knows the bytes that are accessed in it, so a search for the next access to a slice skips the
accesses to all others.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter

from torch import fx

from npugraph_ex.graph.memory.regions import Region, Union

_NEAR = 16  # how many accesses are compared one by one before the tree is used
_BITS = 3  # a branch of the tree has 2 ** _BITS branches


@dataclass(frozen=True)
class MemoryAccess:
    """One node's access to one value's memory, at one position in the graph's order.

    Attributes:
        region: the bytes of the value.
    """

    position: int
    node: fx.Node
    value: fx.Node
    region: Region


class History:
    """The accesses to one memory.

    Args:
        length: all positions are below this number.
    """

    def __init__(self, length: int) -> None:
        self._length = length
        self._accesses: list[MemoryAccess] = []
        self._tree: _Tree | None = None

    def __iter__(self) -> Iterator[MemoryAccess]:
        return iter(self._accesses)

    def add(self, access: MemoryAccess) -> None:
        """Add an access, at any position."""
        insort(self._accesses, access, key=attrgetter("position"))
        if self._tree is not None:
            self._tree.add(access)

    def remove(self, access: MemoryAccess) -> None:
        """Remove an access."""
        self._accesses.remove(access)
        self._tree = None

    def after(self, region: Region, position: int) -> Iterator[MemoryAccess]:
        """The accesses to bytes of ``region`` later than ``position``, in order."""
        start = bisect_right(self._accesses, position, key=attrgetter("position"))
        for index in range(start, len(self._accesses)):
            access = self._accesses[index]
            if index >= start + _NEAR and access.position > position:
                yield from self._by_bytes().after(region, position)
                return
            position = access.position
            if access.region.overlaps(region):
                yield access

    def _by_bytes(self) -> _Tree:
        if self._tree is None:
            self._tree = _Tree(self._length, self._accesses)
        return self._tree


class _Tree:
    """Accesses by position. Each branch covers a range of positions and knows the bytes that are accessed there."""

    def __init__(self, length: int, accesses: list[MemoryAccess]) -> None:
        self._top = -(-length.bit_length() // _BITS)  # the level whose one branch covers all positions
        self._touched: dict[tuple[int, int], Union] = defaultdict(Union)  # by level and position >> (level * _BITS)
        self._leaves: dict[int, list[MemoryAccess]] = defaultdict(list)
        for access in accesses:
            self.add(access)

    def add(self, access: MemoryAccess) -> None:
        """Add an access."""
        self._leaves[access.position].append(access)
        for level in range(1, self._top + 1):
            self._touched[level, access.position >> (level * _BITS)].add(access.region)

    def after(self, region: Region, position: int) -> Iterator[MemoryAccess]:
        """As `History.after`."""
        return self._below(self._top, 0, region, position)

    def _below(self, level: int, branch: int, region: Region, position: int) -> Iterator[MemoryAccess]:
        if level == 0:
            yield from (access for access in self._leaves.get(branch, ()) if access.region.overlaps(region))
        elif (level, branch) in self._touched and self._touched[level, branch].overlaps(region):
            first = branch << _BITS
            earliest = (position + 1) >> ((level - 1) * _BITS)  # earlier branches contain nothing after `position`
            for below in range(max(first, earliest), first + (1 << _BITS)):
                yield from self._below(level - 1, below, region, position)
