"""The figures of a modelled timeline: how much time the streams save, and how much they idle."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from npu_emulator.plurals import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from npu_emulator.clock.timeline import Span, Timeline

__all__ = ["Lane", "Share", "Summary", "idle", "summarise"]

REPLAYED = re.compile(r"graph (\d+), lane")


@dataclass(frozen=True)
class Share:
    """A part of the work.

    Attributes:
        title: the name of the part.
        kernels: its number of kernels; each replay counts.
        busy: modelled microseconds in which any of it runs.
        serial: its modelled microseconds on one stream.
        note: what it is, in words; empty where nobody says it.
    """

    title: str
    kernels: int
    busy: float
    serial: float
    note: str = ""

    @property
    def speed_up(self) -> float:
        """How many times faster than on one stream; 1 if nothing overlaps."""
        return self.serial / self.busy if self.busy else 1.0


@dataclass(frozen=True)
class Lane:
    """One stream, or one lane of the replays of one graph.

    Attributes:
        name: as in `Span.stream`.
        spans: its work, in order.
        idle: the fraction, 0 to 1, of the time of all lanes in which it runs nothing.
    """

    name: str
    spans: tuple[Span, ...]
    idle: float


@dataclass(frozen=True)
class Summary:
    """The figures of a timeline; times in modelled microseconds.

    Attributes:
        whole: all work.
        graphs: the replays of each captured graph.
        lanes: one a stream, in the order of first use.
        critical: the work that determines the end.
        communication: in which any collective or message runs.
        hidden: of that, in which other work runs, too.
    """

    whole: Share
    graphs: tuple[Share, ...]
    lanes: tuple[Lane, ...]
    critical: tuple[Span, ...]
    communication: float = 0.0
    hidden: float = 0.0

    def __str__(self) -> str:
        lines = [
            f"{share.title}: {counted(share.kernels, 'kernel')} in {share.busy:.1f} modelled us; "
            f"on one stream {share.serial:.1f} us, speed-up {share.speed_up:.2f}"
            + (f"\n  {share.note}" if share.note else "")
            for share in (self.whole, *self.graphs)
        ]
        lines.append(f"critical path: {len(self.critical):,} of {counted(self.whole.kernels, 'kernel')}")
        if self.communication:
            lines.append(
                f"communication: {self.communication:.1f} modelled us, {self.hidden:.1f} us of it beside other work"
            )
        lines += [f"{lane.name}: {counted(len(lane.spans), 'kernel')}, idle {lane.idle:.0%}" for lane in self.lanes]
        return "\n".join(lines)


def summarise(timeline: Timeline) -> Summary:
    """Compute the figures of a timeline."""
    lanes: dict[str, list[Span]] = {}
    graphs: dict[int, list[Span]] = {}
    for span in timeline.spans:
        lanes.setdefault(span.stream, []).append(span)
        replayed = REPLAYED.search(span.stream)
        if replayed:
            graphs.setdefault(int(replayed[1]), []).append(span)
    return Summary(
        _share("all work", timeline.spans),
        tuple(_share(f"graph {number}", spans, timeline.notes.get(number, "")) for number, spans in graphs.items()),
        tuple(Lane(name, tuple(spans), idle(spans, timeline.spans)) for name, spans in lanes.items()),
        tuple(timeline.critical_path),
        *_communication(timeline.spans),
    )


def _communication(spans: Sequence[Span]) -> tuple[float, float]:
    """The time in which the spans communicate, and how much of it they compute, too."""
    meetings, others = ([span for span in spans if bool(span.meeting) is meets] for meets in (True, False))
    return covered(meetings), covered(meetings) + covered(others) - covered(spans)


def _share(title: str, spans: Sequence[Span], note: str = "") -> Share:
    return Share(title, len(spans), covered(spans), sum(span.duration for span in spans), note)


def idle(spans: Sequence[Span], everything: Sequence[Span]) -> float:
    """Return the fraction, 0 to 1, of the time of `everything` in which none of `spans` runs."""
    length = max(span.start + span.duration for span in everything) - min(span.start for span in everything)
    return 1 - covered(spans) / length if length else 0.0


def covered(spans: Iterable[Span]) -> float:
    """The time in which at least one of the spans runs."""
    total, reached = 0.0, 0.0
    for span in sorted(spans, key=lambda span: span.start):
        end = span.start + span.duration
        total += max(0.0, end - max(span.start, reached))
        reached = max(reached, end)
    return total
