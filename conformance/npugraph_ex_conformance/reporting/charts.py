"""Histograms of ULPs, as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from npu_emulator.pages import framed

_EDGES = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
_BAR, _LABEL, _LONGEST = 22, 92, 260


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
