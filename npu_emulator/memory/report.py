"""A faulty use of memory, as text."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from npu_emulator.plurals import counted

__all__ = ["FaultKind", "MemoryFault"]


class FaultKind(Enum):
    """The kind of fault."""

    UNWRITTEN = "reads memory that nothing has written"
    FREED = "uses memory that was freed"
    REUSED = "uses memory that was freed and then reused"
    OUTSIDE = "reaches past the end of its memory"


@dataclass(frozen=True)
class MemoryFault:
    """One operator's faulty use of device memory."""

    kind: FaultKind
    operator: str
    frames: tuple[str, ...]
    """The Python lines of its launch, innermost first."""
    stream: int
    """The runtime's number of its stream."""
    address: int
    bytes: int
    """The number of unwritten bytes, or the size of the whole access."""
    allocated: tuple[str, ...]
    """The Python lines of the allocation; empty if that was before the check began."""
    freed: tuple[str, ...] = ()
    of_graph: bool = False
    """Whether eager work uses memory that a capture allocated."""

    def __str__(self) -> str:
        lines = [
            f"{self.operator} {self.kind.value}: {counted(self.bytes, 'byte')} at {self.address:#x}, on stream {self.stream}",
            *_indented(self.frames),
            f"  the memory was allocated {'in a capture ' if self.of_graph else ''}at",
            *_indented(self.allocated),
        ]
        if self.freed:
            lines += ["  and freed at", *_indented(self.freed)]
        repair = _REPLAY if self.of_graph and self.kind is FaultKind.UNWRITTEN else _REPAIRS[self.kind]
        return "\n".join([*lines, f"  repair: {repair}"])


_REPLAY = "replay the graph before you read its result (a capture runs nothing), or write the memory"
_KEEP_ALIVE = "keep the tensor alive for as long as a graph that may be replayed, or a weak reference, uses its memory"
_REPAIRS = {
    FaultKind.UNWRITTEN: "write it first (torch.zeros instead of torch.empty), or wait for the work that writes it",
    FaultKind.FREED: _KEEP_ALIVE,
    FaultKind.REUSED: _KEEP_ALIVE,
    FaultKind.OUTSIDE: "size, strides and offset must stay inside the storage; whoever made the view by hand got one wrong",
}


def _indented(frames: tuple[str, ...]) -> list[str]:
    return [f"      {frame}" for frame in frames] or ["      (no Python line)"]
