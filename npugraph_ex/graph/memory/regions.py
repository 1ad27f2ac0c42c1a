"""A piece of memory as the alias analysis names it: a storage, and the bytes in it. Not who uses it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from typing import NamedTuple

import torch

UNKNOWN = -1
"""The name of memory of which nothing is known."""

EVERYWHERE = 1 << 62
"""Where a range ends of which nothing is known but that it lies in the storage."""


class Region(NamedTuple):
    """Bytes ``start`` (inclusive) to ``stop`` (exclusive) of the memory named ``root``."""

    root: int
    start: int = 0
    stop: int = EVERYWHERE

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor, root: int) -> Region:
        """The bytes from the first to the last element of ``tensor`` in the storage named ``root``.

        Elements in between that are not the tensor's count as its own. The whole storage where sizes are symbolic, and
        for a tensor without elements: it has no bytes, yet whose memory it lies in can be seen.
        """
        offset, span = tensor.storage_offset(), 1
        if type(offset) is not int or tensor.layout != torch.strided:
            return cls(root)
        for size, step in zip(tensor.size(), tensor.stride(), strict=True):
            if type(size) is not int or type(step) is not int or size == 0:
                return cls(root)
            span += (size - 1) * step
        width = tensor.element_size()
        return cls(root, offset * width, (offset + span) * width)

    @property
    def is_exact(self) -> bool:
        """Whether it is known which memory and which bytes."""
        return self.root != UNKNOWN and self.stop != EVERYWHERE

    def overlaps(self, other: Region) -> bool:
        """Whether the two may have a byte in common; assumed where nothing is known."""
        if self.root != other.root:
            return UNKNOWN in (self.root, other.root)
        return self.start < other.stop and other.start < self.stop

    def covers(self, other: Region) -> bool:
        """Whether every byte of ``other`` is known to be one of these."""
        return self.root == other.root != UNKNOWN and self.start <= other.start and other.stop <= self.stop


class Union:
    """Bytes that lie in any of some regions.

    Args:
        regions: those to begin with.
    """

    def __init__(self, regions: Iterable[Region] = ()) -> None:
        self._starts: dict[int, list[int]] = {}  # of each root's pieces, which neither overlap nor touch, in order
        self._stops: dict[int, list[int]] = {}
        for region in sorted(regions):
            self.add(region)

    def add(self, region: Region) -> None:
        """Take in another region."""
        starts, stops = self._starts.setdefault(region.root, []), self._stops.setdefault(region.root, [])
        first, last = bisect_left(stops, region.start), bisect_right(starts, region.stop)
        if first < last:
            starts[first:last] = [min(starts[first], region.start)]
            stops[first:last] = [max(stops[last - 1], region.stop)]
        else:
            starts.insert(first, region.start)
            stops.insert(first, region.stop)

    def overlaps(self, region: Region) -> bool:
        """Whether ``region`` may have a byte in common with one of them."""
        if UNKNOWN in self._starts or (region.root == UNKNOWN and self._starts):
            return True
        last = bisect_left(self._starts.get(region.root, ()), region.stop) - 1
        return last >= 0 and self._stops[region.root][last] > region.start
