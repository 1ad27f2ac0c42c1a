"""A timeline as a Chrome trace (the Trace Event Format): spans are complete events, arrows are pairs of flow events.

Perfetto counts whole nanoseconds, drops a span that overlaps the one before it, and binds an arrow's end to the span that
encloses it. So times are rounded to nanoseconds first. An arrow starts inside the last span before its event and ends at the
first span after its wait. Without such spans nothing was ordered, and there is no arrow.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from npu_emulator.clock.timeline import Timeline

__all__ = ["chrome_trace"]


class _Track:
    """The spans of one stream, in order: their beginnings and ends in nanoseconds."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.begins: list[int] = []
        self.ends: list[int] = []

    def before(self, time: int) -> int | None:
        """Return the last nanosecond of the last span that has ended at `time`."""
        place = bisect_right(self.ends, time)
        return self.ends[place - 1] - 1 if place else None

    def behind(self, time: int) -> int | None:
        """Return the beginning of the first span that begins at `time` or later."""
        place = bisect_left(self.begins, time)
        return self.begins[place] if place < len(self.begins) else None


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """Return an object for `json.dump`: `ts` and `dur` in modelled microseconds, one `tid` for each stream."""
    title = f"modelled: {timeline.model.name}"
    rows: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 0, "args": {"name": title}}]
    tracks: dict[str, _Track] = {}
    critical = set(map(id, timeline.critical_path))
    for span in timeline.spans:
        track = tracks.get(span.stream)
        if track is None:
            track = tracks[span.stream] = _Track(len(tracks))
            rows.append(
                {"ph": "M", "name": "thread_name", "pid": 0, "tid": track.number, "args": {"name": span.stream}}
            )
        begin, end = _nanoseconds(span.start), _nanoseconds(span.start + span.duration)
        track.begins.append(begin)
        track.ends.append(end)
        args = {"line": span.line, "critical": id(span) in critical} | (
            {"meeting": span.meeting} if span.meeting else {}
        )
        rows.append(
            {"ph": "X", "name": span.name, "cat": "modelled", **_place(track, begin), "dur": (end - begin) / 1000, "args": args}
        )  # fmt: skip
    for number, arrow in enumerate(timeline.arrows):
        source, target = tracks.get(arrow.source[0]), tracks.get(arrow.target[0])
        leaves = source.before(_nanoseconds(arrow.source[1])) if source else None
        arrives = target.behind(_nanoseconds(arrow.target[1])) if target else None
        if source and target and leaves is not None and arrives is not None:
            common = {"name": "event", "cat": "event", "id": number}
            rows.append({"ph": "s", **common, **_place(source, leaves)})
            rows.append({"ph": "f", "bp": "e", **common, **_place(target, arrives)})
    return {"traceEvents": rows, "otherData": {"time": "modelled, not measured"}}


def _nanoseconds(microseconds: float) -> int:
    return round(microseconds * 1000)


def _place(track: _Track, nanoseconds: int) -> dict[str, Any]:
    return {"pid": 0, "tid": track.number, "ts": nanoseconds / 1000}
