"""The blocks of torch_npu's allocator, by address, with the Python lines of allocation and free."""

from __future__ import annotations

from bisect import bisect_right, insort
from dataclasses import dataclass
from math import inf

__all__ = ["Block", "Blocks"]


@dataclass(eq=False)
class Block:
    """One piece of device memory from the caching allocator."""

    start: int
    size: int
    """Bytes, as the allocator rounded them up."""
    stream: int
    """Raw handle of the stream that it was allocated for."""
    captured: bool
    """Whether it was allocated during a capture: then a graph owns the memory, and uses it long after the tensor is gone."""
    frames: tuple[str, ...]
    freed: tuple[str, ...] | None = None
    since: int = 0
    until: float = inf
    """The moments of allocation and free on the host, by `Runtime.new_moment`."""

    @property
    def end(self) -> int:
        """One past the last byte."""
        return self.start + self.size


class Blocks:
    """All blocks that are live, or freed and not yet reused."""

    def __init__(self) -> None:
        """Start empty: memory allocated earlier is unknown and not checked."""
        self._starts: list[int] = []
        self._blocks: dict[int, Block] = {}

    def add(self, block: Block) -> None:
        """Add a new block, and remove the freed blocks that it overlaps."""
        first = bisect_right(self._starts, block.start)
        if first and self._blocks[self._starts[first - 1]].end > block.start:
            first -= 1
        last = first
        while last < len(self._starts) and self._starts[last] < block.end:
            del self._blocks[self._starts[last]]
            last += 1
        del self._starts[first:last]
        insort(self._starts, block.start)
        self._blocks[block.start] = block

    def holding(self, address: int) -> Block | None:
        """Return the block of an address; None if the memory is unknown."""
        place = bisect_right(self._starts, address)
        if not place:
            return None
        block = self._blocks[self._starts[place - 1]]
        return block if address < block.end else None
