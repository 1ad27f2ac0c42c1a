"""A modelled timeline as one HTML page without scripts, fonts or network access.

Each stream has a lane; filled boxes are work, hatched areas are idle time, curves are events. Wide timelines scroll sideways
and the lanes' names stay visible, so that the page is readable on a phone too.
"""

from __future__ import annotations

import math
from html import escape
from importlib import resources
from statistics import median
from typing import TYPE_CHECKING

from npu_emulator.clock.summary import Share, Summary, idle, summarise

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from npu_emulator.clock.timeline import Arrow, Span, Timeline

__all__ = ["picture"]

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
    summary = summarise(timeline)
    style = resources.files("npu_emulator.clock").joinpath("picture.css").read_text()
    model = (
        f"Modelled, not measured: a roofline of the {timeline.model.name}; streams share neither cores nor bandwidth."
    )
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="note">{escape(model)}</p>',
        _facts(summary, len(timeline.arrows)),
        _chart(timeline, summary) if timeline.spans else "<p>Nothing ran on the device.</p>",
        _graphs(summary.graphs),
        _critical(summary),
    ]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>\n{style}</style></head>\n'
        f"<body>\n{chr(10).join(part for part in parts if part)}\n</body></html>\n"
    )


def _facts(summary: Summary, events: int) -> str:
    whole = summary.whole
    facts = [
        ("with streams", f"{whole.busy:.1f} µs"),
        ("on one stream", f"{whole.serial:.1f} µs"),
        ("speed-up", f"{whole.speed_up:.2f} ×"),
        ("kernels on the critical path", f"{len(summary.critical)} of {whole.kernels}"),
        ("events between streams", str(events)),
    ]
    cards = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts)
    return f'<dl class="facts">{cards}</dl>'


def _chart(timeline: Timeline, summary: Summary) -> str:
    shown = timeline.spans[-_MOST_SPANS:]
    begin, end = min(span.start for span in shown), timeline.end
    scale = _Scale(begin, max(end - begin, 1e-9))
    critical = set(map(id, summary.critical))
    kept = set(map(id, shown))
    rows = []
    for lane in summary.lanes:
        drawn = [span for span in lane.spans if id(span) in kept]
        boxes = "".join(_box(span, scale, critical=id(span) in critical) for span in drawn)
        name = f"{escape(lane.name)} <small>idle {idle(drawn, shown):.0%}</small>"
        rows.append(f'<div class="lane"><div class="name">{name}</div><div class="track">{boxes}</div></div>')
    width = min(_WIDEST, max(320, _PIXELS_A_SPAN * scale.length / max(median(span.duration for span in shown), 1e-9)))
    places = {lane.name: number for number, lane in enumerate(summary.lanes)}
    arrows = [arrow for arrow in timeline.arrows if arrow.target[0] in places and arrow.source[0] in places]
    left_out = len(timeline.spans) - len(shown)
    hint = f"<p>The first {left_out} pieces of work are not drawn.</p>" if left_out else ""
    legend = '<p class="legend"><i class="critical"></i> critical path <i></i> other work <i class="idle"></i> idle</p>'
    axis, curves = _axis(scale, round(max(width, 700) / 100)), _curves(arrows, places, scale)
    lanes = f'<div class="lanes">{"".join(rows)}{curves}</div>'
    return f'{legend}{hint}<div class="scroll"><div class="canvas" style="min-width:{width:.0f}px">{axis}{lanes}</div></div>'


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
        paths.append(f'<path d="M{x1:.2f} {y1:.0f}C{x1:.2f} {middle:.0f} {x2:.2f} {middle:.0f} {x2:.2f} {y2:.0f}"/>')
        heads.append(f'<b style="left:{x2 / 10:.3f}%;top:{y2:.0f}px"></b>')
    svg = f'<svg viewBox="0 0 1000 {height}" preserveAspectRatio="none" aria-hidden="true">{"".join(paths)}</svg>'
    return f'<div class="events" style="height:{height}px">{svg}{"".join(heads)}</div>'


def _graphs(graphs: Sequence[Share]) -> str:
    rows = [
        (share.title, str(share.kernels), f"{share.busy:.1f}", f"{share.serial:.1f}", f"{share.speed_up:.2f} ×")
        for share in graphs
    ]
    return _table("Replays", ("", "kernels", "with streams, µs", "on one stream, µs", "speed-up"), rows)


def _critical(summary: Summary) -> str:
    rows = [
        (f"{span.start:.1f}", span.name, span.stream, f"{span.duration:.1f}", span.line)
        for span in summary.critical[:_MOST_ROWS]
    ]
    more = len(summary.critical) - len(rows)
    table = _table("Critical path", ("start, µs", "operator", "stream", "µs", "line"), rows)
    return table + (f"<p>… and {more} more.</p>" if more else "")


def _table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<h2>{title}</h2><div class="scroll"><table><tr>{head}</tr>{body}</table></div>'
