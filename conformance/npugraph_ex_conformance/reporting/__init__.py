"""What a run looks like on one self-contained HTML page: drawings as SVG, tables, no script, nothing loaded from elsewhere."""

from __future__ import annotations

from npugraph_ex_conformance.reporting.charts import draw_histogram, draw_timeline
from npugraph_ex_conformance.reporting.drawing import draw_program
from npugraph_ex_conformance.reporting.html import Section, drawing, preformatted, render_page, table

__all__ = [
    "Section",
    "draw_histogram",
    "draw_program",
    "draw_timeline",
    "drawing",
    "preformatted",
    "render_page",
    "table",
]
