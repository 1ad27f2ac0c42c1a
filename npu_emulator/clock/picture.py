"""A modelled timeline as a page and as a chart.

Each stream has a lane; filled boxes are work, hatched areas are idle time, curves are events. Wide timelines scroll sideways
and the lanes' names stay visible, so that the page is readable on a phone too.
"""

from __future__ import annotations

import math
from html import escape
from statistics import median
from typing import TYPE_CHECKING

from npu_emulator.clock.summary import REPLAYED, Share, Summary, idle, summarise
from npu_emulator.pages import Drawing, Facts, Page, PageTable, Section

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from npu_emulator.clock.timeline import Arrow, Span, Timeline

__all__ = ["chart", "picture", "sections"]

_ROW, _TRACK_TOP, _TRACK = 56, 22, 26
"""Pixels of a lane, of the name above its track, and of the track; as in the style sheet."""

_MOST_SPANS = 4000
_MOST_ROWS = 40
_PIXELS_A_SPAN, _WIDEST = 44, 20_000
"""The least width of half of the boxes on a narrow screen, in pixels, and the largest width of the page."""


def picture(timeline: Timeline, *, title: str) -> str:
    """Draw a timeline.

    Args:
        timeline: the timeline, after its block.
        title: the page's heading.

    Returns:
        An HTML document.
    """
    return Page(title, sections(timeline)).html()


def sections(timeline: Timeline) -> list[Section]:
    """The parts of the page: figures and chart, the replays, the critical path."""
    summary = summarise(timeline)
    whole = summary.whole
    facts = [
        ("with streams", f"{whole.busy:.1f} µs"),
        ("on one stream", f"{whole.serial:.1f} µs"),
        ("speed-up", f"{whole.speed_up:.2f} ×"),
        ("kernels on the critical path", f"{len(summary.critical)} of {whole.kernels}"),
        ("events between streams", str(len(timeline.arrows))),
    ]
    model = (
        f"Modelled, not measured: a roofline of the {timeline.model.name}; streams share neither cores nor bandwidth."
    )
    left_out = len(timeline.spans) - _MOST_SPANS
    text = model if timeline.spans else f"{model} Nothing ran on the device."
    text += f" The first {left_out} pieces of work are not drawn." if left_out > 0 else ""
    drawn = (
        Drawing(chart(timeline.spans, timeline.arrows, summary.critical, timeline.names)) if timeline.spans else None
    )
    return [
        Section("Modelled time", [Facts(facts), *([drawn] if drawn else [])], text),
        Section("Replays", [_graphs(summary.graphs)]),
        Section("Critical path", [_critical(summary)], _more(summary)),
    ]


def chart(
    spans: Sequence[Span],
    arrows: Sequence[Arrow] = (),
    critical: Sequence[Span] = (),
    names: Mapping[int, str] | None = None,
) -> str:
    """The HTML of the lanes.

    Args:
        spans: the work; the latest 4000 are drawn.
        arrows: the events between its streams.
        critical: those of the spans that determine the end.
        names: the functions of captured graphs, by number.
    """
    shown = spans[-_MOST_SPANS:]
    begin, end = min(span.start for span in shown), max(span.start + span.duration for span in shown)
    scale = _Scale(begin, max(end - begin, 1e-9))
    marked = set(map(id, critical))
    lanes = dict.fromkeys(span.stream for span in spans)
    rows = []
    for lane in lanes:
        drawn = [span for span in shown if span.stream == lane]
        boxes = "".join(_box(span, scale, critical=id(span) in marked) for span in drawn)
        graph = REPLAYED.search(lane)
        said = ": ".join(filter(None, (lane, names.get(int(graph[1])) if graph and names else "")))
        name = f"{escape(said)} <small>idle {idle(drawn, shown):.0%}</small>"
        rows.append(f'<div class="lane"><div class="name">{name}</div><div class="track">{boxes}</div></div>')
    width = min(_WIDEST, max(320, _PIXELS_A_SPAN * scale.length / max(median(span.duration for span in shown), 1e-9)))
    places = {name: number for number, name in enumerate(lanes)}
    between = [arrow for arrow in arrows if arrow.target[0] in places and arrow.source[0] in places]
    legend = '<i class="critical"></i> critical path <i></i> other work <i class="idle"></i> idle'
    axis, curves = _axis(scale, round(max(width, 700) / 100)), _curves(between, places, scale)
    label = f"timeline of {len(lanes)} streams{'; a table below lists the critical path' if critical else ''}"
    return (
        f'<p class="legend faint">{legend}</p><div class="canvas" role="img" aria-label="{label}" '
        f'style="min-width:{width:.0f}px">{axis}<div class="lanes">{"".join(rows)}{curves}</div></div>'
    )


class _Scale:
    """From modelled microseconds to percent of the width."""

    def __init__(self, begin: float, length: float) -> None:
        self.begin, self.length = begin, length

    def at(self, time: float) -> float:
        return 100 * (time - self.begin) / self.length

    def ticks(self, count: int) -> Iterable[float]:
        """At most `count` round times."""
        rough = self.length / count
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
        first = math.ceil(self.begin / step)
        return [number * step for number in range(first, int((self.begin + self.length) / step) + 1)]


def _axis(scale: _Scale, count: int) -> str:
    ticks = "".join(f'<span style="left:{scale.at(time):.3f}%">{time:g} µs</span>' for time in scale.ticks(count))
    return f'<div class="axis">{ticks}</div>'


def _box(span: Span, scale: _Scale, *, critical: bool) -> str:
    short = span.name.split(".")[1] if span.name.count(".") > 1 else span.name
    tip = f"{span.name}\n{span.start:.2f} µs, for {span.duration:.2f} µs\n{span.line}"
    kind = ' class="critical"' if critical else ""
    place = f"left:{scale.at(span.start):.4f}%;width:{100 * span.duration / scale.length:.4f}%"
    return f'<i{kind} style="{place}" title="{escape(tip)}">{escape(short)}</i>'


def _curves(arrows: Sequence[Arrow], places: dict[str, int], scale: _Scale) -> str:
    """The events: a curve from the end of one lane's work to another lane, and a dot at its end."""
    height = _ROW * len(places)
    paths, heads = [], []
    for arrow in arrows:
        if arrow.source[1] < scale.begin:
            continue
        (x1, y1), (x2, y2) = (
            (10 * scale.at(time), _ROW * places[stream] + _TRACK_TOP + _TRACK / 2)
            for stream, time in (arrow.source, arrow.target)
        )
        way = 1 if y2 > y1 else -1
        y1, y2 = y1 + way * _TRACK / 2, y2 - way * _TRACK / 2
        middle = (y1 + y2) / 2
        paths.append(f'd="M{x1:.2f} {y1:.0f}C{x1:.2f} {middle:.0f} {x2:.2f} {middle:.0f} {x2:.2f} {y2:.0f}"/>')
        heads.append(f'<b style="left:{x2 / 10:.3f}%;top:{y2:.0f}px"></b>')
    # Each curve lies on a wider one of the page's colour: over a box of any colour it would be hard to see.
    drawn = "".join([*(f'<path class="halo" {path}' for path in paths), *(f"<path {path}" for path in paths)])
    svg = f'<svg viewBox="0 0 1000 {height}" preserveAspectRatio="none" aria-hidden="true">{drawn}</svg>'
    return f'<div class="events" style="height:{height}px">{svg}{"".join(heads)}</div>'


def _graphs(graphs: Sequence[Share]) -> PageTable:
    rows = [
        (share.title, share.kernels, f"{share.busy:.1f}", f"{share.serial:.1f}", f"{share.speed_up:.2f} ×", share.note)
        for share in graphs
    ]
    return PageTable(("graph", "kernels", "with streams, µs", "on one stream, µs", "speed-up", "what it is"), rows)


def _critical(summary: Summary) -> PageTable:
    rows = [
        (f"{span.start:.1f}", span.name, span.stream, f"{span.duration:.1f}", span.line)
        for span in summary.critical[:_MOST_ROWS]
    ]
    return PageTable(("start, µs", "operator", "stream", "µs", "line"), rows)


def _more(summary: Summary) -> str:
    return f"The first {_MOST_ROWS} of {len(summary.critical)}." if len(summary.critical) > _MOST_ROWS else ""
