"""What torch_npu's allocator has handed out and taken back, by address, with the Python lines of both."""

from __future__ import annotations

from bisect import bisect_right, insort
from dataclasses import dataclass

__all__ = ["Block", "Blocks"]


@dataclass(eq=False)
class Block:
    """One piece of device memory that the caching allocator handed out."""

    start: int
    size: int
    """Bytes, as the allocator rounded them up."""
    stream: int
    """Raw handle of the stream that it was allocated for."""
    captured: bool
    """Whether a capture was under way: a graph then owns the memory, and uses it long after its tensor is gone."""
    frames: tuple[str, ...]
    freed: tuple[str, ...] | None = None

    @property
    def end(self) -> int:
        """One past the last byte."""
        return self.start + self.size


class Blocks:
    """All blocks, live or freed and not handed out again."""

    def __init__(self) -> None:
        """Start empty: memory allocated earlier is not known, and nothing is said about it."""
        self._starts: list[int] = []
        self._blocks: dict[int, Block] = {}

    def add(self, block: Block) -> None:
        """Remember a new block, and forget the freed ones whose place it takes."""
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
        """Return the block that an address lies in; None if the memory is unknown."""
        place = bisect_right(self._starts, address)
        if not place:
            return None
        block = self._blocks[self._starts[place - 1]]
        return block if address < block.end else None
