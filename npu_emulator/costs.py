"""The costs of captured graphs, as a table: `python -m npu_emulator --costs program`."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from npu_emulator.plurals import counted

if TYPE_CHECKING:
    from npu_emulator.device import Resources
    from npu_emulator.settings import Settings

__all__ = ["cost_table"]

_HEADER = ("graphs", "streams", "events", "kernels", "other tasks", "pool MiB", "fit before 207008")


def cost_table(resources: Resources, settings: Settings) -> str:
    """Return a table of all captured graphs; equal ones share a row, those with most streams come first."""
    device = (
        f"{settings.soc} (emulated): "
        f"{counted(resources.streams, 'stream')}, {counted(resources.events, 'event')}, {settings.memory_gb} GiB; "
        f"in use now: {counted(resources.streams_used, 'stream')}, {counted(resources.events_used, 'event')}"
    )
    alike = Counter(graph._replace(id=0, alive=0) for graph in resources.captured)
    rows = [_HEADER]
    for graph, count in sorted(alike.items(), key=lambda pair: (-pair[0].streams, -pair[0].kernels)):
        mebibytes = f"{graph.pool_bytes / 2**20:.1f}"
        numbers = (
            count,
            graph.streams,
            graph.events,
            graph.kernels,
            graph.other_tasks,
            mebibytes,
            resources.takes(graph),
        )
        rows.append(tuple(map(str, numbers)))  # type: ignore[arg-type]
    if len(rows) == 1:
        return f"{device}\nno graph was captured"
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([device, *lines])
