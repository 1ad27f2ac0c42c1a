"""The costs of captured graphs, as a table or as data: `python -m npu_emulator --costs program`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from npu_emulator.plurals import counted

if TYPE_CHECKING:
    from npu_emulator.device import Resources
    from npu_emulator.settings import Settings

__all__ = ["cost_table", "costs"]

_HEADER = ("graphs", "streams", "events", "kernels", "other tasks", "pool MiB", "fit before 207008")


def cost_table(resources: Resources, settings: Settings) -> str:
    """Return a table of all captured graphs; equal ones share a row, those with most streams come first."""
    device = (
        f"{settings.soc} (emulated): "
        f"{counted(resources.streams, 'stream')}, {counted(resources.events, 'event')}, {settings.memory_gb} GiB; "
        f"in use now: {counted(resources.streams_used, 'stream')}, {counted(resources.events_used, 'event')}"
    )
    rows = [_HEADER]
    for row in _rows(resources):
        numbers = {**row, "pool_bytes": f"{row['pool_bytes'] / 2**20:.1f}"}
        rows.append(tuple(map(str, numbers.values())))  # type: ignore[arg-type]
    if len(rows) == 1:
        return f"{device}\nno graph was captured"
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([device, *lines])


def costs(resources: Resources, settings: Settings) -> dict[str, Any]:
    """Return what the table says as data, for JSON."""
    return {
        "device": settings.soc,
        "streams": resources.streams,
        "events": resources.events,
        "memory_gb": settings.memory_gb,
        "streams_used": resources.streams_used,
        "events_used": resources.events_used,
        "captured": [*_rows(resources)],
    }


def _rows(resources: Resources) -> Iterator[dict[str, int]]:
    """A row for all equal graphs, in the order of the table's columns."""
    alike = Counter(graph._replace(id=0, alive=0) for graph in resources.captured)
    for graph, count in sorted(alike.items(), key=lambda pair: (-pair[0].streams, -pair[0].kernels)):
        yield {
            "graphs": count,
            "streams": graph.streams,
            "events": graph.events,
            "kernels": graph.kernels,
            "other_tasks": graph.other_tasks,
            "pool_bytes": graph.pool_bytes,
            "fit": resources.takes(graph),
        }
