"""A piece of memory for the alias analysis: a storage and a range of its bytes."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from typing import NamedTuple

import torch

UNKNOWN = -1
"""The name of unknown memory."""

EVERYWHERE = 1 << 62
"""The end of a range of which only the storage is known."""


class Region(NamedTuple):
    """Bytes ``start`` (inclusive) to ``stop`` (exclusive) of the memory named ``root``."""

    root: int
    start: int = 0
    stop: int = EVERYWHERE

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor, root: int) -> Region:
        """The bytes from the first to the last element of ``tensor`` in the storage named ``root``.

        Gaps between the elements count too. With symbolic sizes it is the whole storage. It is also the whole storage for a
        tensor without elements: such a tensor has no bytes, but a program can see its storage.
        """
        offset, span = tensor.storage_offset(), 1
        if type(offset) is not int:
            return cls(root)
        for size, step in zip(tensor.size(), tensor.stride(), strict=True):
            if type(size) is not int or type(step) is not int or size == 0:
                return cls(root)
            span += (size - 1) * step
        width = tensor.element_size()
        return cls(root, offset * width, (offset + span) * width)

    @property
    def is_exact(self) -> bool:
        """Whether memory and bytes are both known."""
        return self.root != UNKNOWN and self.stop != EVERYWHERE

    def overlaps(self, other: Region) -> bool:
        """Whether the two may have a byte in common; True if nothing is known."""
        if self.root != other.root:
            return UNKNOWN in (self.root, other.root)
        return self.start < other.stop and other.start < self.stop

    def covers(self, other: Region) -> bool:
        """Whether every byte of ``other`` is known to be in this region."""
        return self.root == other.root != UNKNOWN and self.start <= other.start and other.stop <= self.stop


class Union:
    """The union of some regions.

    Args:
        regions: the first regions.
    """

    def __init__(self, regions: Iterable[Region] = ()) -> None:
        self._starts: dict[int, list[int]] = {}  # by root, the sorted pieces, which neither overlap nor touch
        self._stops: dict[int, list[int]] = {}
        for region in sorted(regions):
            self.add(region)

    def add(self, region: Region) -> None:
        """Add a region."""
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
