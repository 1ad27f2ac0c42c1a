"""A race as text: both sides, the missing edge, and the repair."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from npu_emulator.plurals import counted

if TYPE_CHECKING:
    from npu_emulator.races.access import Access
    from npu_emulator.races.clocks import Operation

__all__ = ["Race"]


@dataclass(frozen=True)
class Race:
    """Two operations that share bytes, of which at least one writes, without an order between them."""

    first: Operation
    """The first launched operation."""
    first_access: Access
    second: Operation
    second_access: Access
    shared_bytes: int
    graph: int | None = None
    """The graph that contains both, if one does; streams are then the graph's own, counted from 0."""

    def __str__(self) -> str:
        where = f" inside captured graph {self.graph}" if self.graph is not None else ""
        return (
            f"race on {counted(self.shared_bytes, 'byte')} of device memory at "
            f"{max(self.first_access.start, self.second_access.start):#x}"
            f"{where}\n{_side(self.first, self.first_access)}\n{_side(self.second, self.second_access)}\n"
            f"  missing edge: stream {self.second.stream} does not wait for stream {self.first.stream}\n"
            f"  repair: {self._repair()}"
        )

    def _repair(self) -> str:
        if self.second.fresh and self.second_access.writes:
            return (
                "the memory was freed while the first could still run, and then reused; call "
                "tensor.record_stream(stream) on the freed tensor with the stream that used it, or keep it alive until "
                "the streams have joined"
            )
        return (
            "after the first, `event = first_stream.record_event()`; before the second, "
            "`second_stream.wait_event(event)` (or `second_stream.wait_stream(first_stream)` between the two)"
        )


def _side(operation: Operation, access: Access) -> str:
    verb = "writes" if access.writes else "reads"
    frames = "\n".join(f"      {frame}" for frame in operation.frames) or "      (no Python line)"
    what = f"{access.end - access.start} bytes from {access.start:#x} on stream {operation.stream}"
    return f"  {operation.name} {verb} {what}\n{frames}"
