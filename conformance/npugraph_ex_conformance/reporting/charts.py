"""Histograms of ULPs and timelines of streams, as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Protocol

from npugraph_ex_conformance.reporting.svg import framed

_EDGES = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
_BAR, _LABEL, _LONGEST = 22, 92, 260
_LANE, _AXIS, _LEFT, _WIDE = 34, 26, 150, 860


class ChartSpan(Protocol):
    """One piece of work on a stream; times in microseconds."""

    @property
    def name(self) -> str:
        """What ran."""

    @property
    def stream(self) -> str:
        """Where."""

    @property
    def start(self) -> float:
        """When it began."""

    @property
    def duration(self) -> float:
        """How long it took."""


def binned(values: Sequence[float]) -> list[tuple[str, int]]:
    """How many values are equal to the reference, up to half an ulp off, up to one, and so on."""
    labels = ["equal", *(f"up to {edge:g}" for edge in _EDGES[1:]), f"above {_EDGES[-1]:g}"]
    counts = [0] * len(labels)
    for value in values:
        counts[next((i for i, edge in enumerate(_EDGES) if value <= edge), len(_EDGES))] += 1
    return list(zip(labels, counts, strict=True))


def draw_histogram(values: Sequence[float]) -> str:
    """The SVG of how far results are from the reference, in ulps; the length of a bar is the logarithm of its count."""
    rows = binned(values)
    most = max((count for _, count in rows), default=0)
    height, width = len(rows) * _BAR + 4, _LABEL + _LONGEST + 60
    parts: list[str] = []
    for position, (label, count) in enumerate(rows):
        y = position * _BAR
        length = _LONGEST * math.log1p(count) / math.log1p(most) if most else 0.0
        parts.append(f'<text class="left" x="{_LABEL - 8}" y="{y + 15}">{escape(label)}</text>')
        parts.append(f'<rect class="bar" x="{_LABEL}" y="{y + 3}" width="{length:.1f}" height="{_BAR - 6}"/>')
        parts.append(f'<text class="right" x="{_LABEL + length + 6:.1f}" y="{y + 15}">{count}</text>')
    return framed("histogram", "histogram of ulps", width, height, parts)


def draw_timeline(spans: Sequence[ChartSpan]) -> str:
    """The SVG of work on streams: one lane a stream, time to the right in microseconds."""
    lanes = list(dict.fromkeys(span.stream for span in spans))
    end = max((span.start + span.duration for span in spans), default=0.0) or 1.0
    height = len(lanes) * _LANE + _AXIS
    scale = (_WIDE - _LEFT - 10) / end
    parts: list[str] = []
    for position, lane in enumerate(lanes):
        y = position * _LANE
        parts.append(f'<text class="left" x="{_LEFT - 8}" y="{y + 20}">{escape(lane)}</text>')
        parts.append(f'<line class="edge" x1="{_LEFT}" y1="{y + _LANE}" x2="{_WIDE}" y2="{y + _LANE}"/>')
    for span in spans:
        x, y = _LEFT + span.start * scale, lanes.index(span.stream) * _LANE
        what = escape(f"{span.name}: {span.start:.1f} to {span.start + span.duration:.1f} µs")
        parts.append(
            f'<rect class="span" x="{x:.1f}" y="{y + 4}" width="{max(span.duration * scale, 1):.1f}" '
            f'height="{_LANE - 8}"><title>{what}</title></rect>'
        )
    for tick in range(5):
        x = _LEFT + (_WIDE - _LEFT - 10) * tick / 4
        anchor = "right" if tick == 0 else "left" if tick == 4 else "middle"
        parts.append(f'<text class="{anchor}" x="{x:.1f}" y="{height - 8}">{end * tick / 4:.1f} µs</text>')
    return framed("timeline", "timeline of streams", _WIDE, height, parts)
