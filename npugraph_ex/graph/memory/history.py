"""The accesses to one memory in the order of the graph, found by the bytes that they touch.

Most memory is touched a few times, where looking at each access is best. One buffer that is cut into thousands of slices
is not: there a tree over time, whose every branch knows which bytes are touched in it, leads to the next access of a slice
past all that is done to the others.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter

from torch import fx

from npugraph_ex.graph.memory.regions import Region, Union

_NEAR = 16  # how many accesses are looked at one by one before the tree is asked
_BITS = 3  # a branch of the tree has 2 ** _BITS branches


@dataclass(frozen=True)
class MemoryAccess:
    """One node touching one value's memory, at one place in the graph's order.

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
        length: positions are below this number.
    """

    def __init__(self, length: int) -> None:
        self._length = length
        self._accesses: list[MemoryAccess] = []
        self._tree: _Tree | None = None

    def __iter__(self) -> Iterator[MemoryAccess]:
        return iter(self._accesses)

    def add(self, access: MemoryAccess) -> None:
        """Note another access, at any position."""
        insort(self._accesses, access, key=attrgetter("position"))
        if self._tree is not None:
            self._tree.add(access)

    def remove(self, access: MemoryAccess) -> None:
        """Forget an access."""
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
    """Accesses by position; each branch covers a range of positions and knows the bytes that are touched there."""

    def __init__(self, length: int, accesses: list[MemoryAccess]) -> None:
        self._top = -(-length.bit_length() // _BITS)  # the level whose one branch covers all positions
        self._touched: dict[tuple[int, int], Union] = defaultdict(Union)  # by level and position >> (level * _BITS)
        self._leaves: dict[int, list[MemoryAccess]] = defaultdict(list)
        for access in accesses:
            self.add(access)

    def add(self, access: MemoryAccess) -> None:
        """Note another access."""
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
            earliest = (position + 1) >> ((level - 1) * _BITS)  # branches before it hold nothing later than `position`
            for below in range(max(first, earliest), first + (1 << _BITS)):
                yield from self._below(level - 1, below, region, position)
