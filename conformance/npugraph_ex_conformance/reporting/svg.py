"""The frame that all drawings share."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape


def framed(kind: str, label: str, width: float, height: float, parts: Iterable[str]) -> str:
    """An SVG element of this size in pixels; ``label`` is read to those who cannot see it."""
    head = (
        f'<svg class="{kind}" role="img" aria-label="{escape(label)}" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}">'
    )
    return "\n".join([head, *parts, "</svg>"])
