"""One HTML page from sections: a heading, a sentence, and blocks. Self-contained; readable on a telephone and on paper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_STYLE = """
:root { --ink: #1c2330; --paper: #fff; --faint: #667; --line: #d5d9e0; --good: #1a7f45; --bad: #b42318;
  --box: #eef1f5; --mark: #ffe3b3; --bar: #3b6fb6; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7ec; --paper: #14181f; --faint: #98a1b0; --line: #333b48;
  --good: #56c288; --bad: #ff8578; --box: #232a35; --mark: #6b4c14; --bar: #6f9fe0; } }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 0 auto;
  max-width: 1080px; padding: 1rem; }
h1 { font-size: 1.5rem; margin: .2rem 0; } h2 { font-size: 1.15rem; margin: 2rem 0 .3rem; }
p { margin: .3rem 0; } .faint { color: var(--faint); }
.good { color: var(--good); font-weight: 600; } .bad { color: var(--bad); font-weight: 600; }
.wide { overflow-x: auto; margin: .6rem 0; } /* what is wider than the screen scrolls by itself */
table { border-collapse: collapse; font-size: .86rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .25rem .7rem .25rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--faint); font-weight: 600; white-space: nowrap; }
td:not(:first-child) { white-space: nowrap; } tr:has(.bad) { color: var(--bad); } /* seen before one has scrolled */
pre { font-size: .8rem; background: var(--box); padding: .7rem; margin: 0; }
details { margin: .5rem 0; } summary { cursor: pointer; font-weight: 600; word-break: break-all; }
figure { display: inline-block; max-width: 100%; vertical-align: top; margin: .5rem 0; padding-right: 1rem; }
svg.histogram { max-width: 100%; height: auto; } figcaption { color: var(--faint); font-size: .86rem; max-width: 34rem;
  overflow-wrap: anywhere; }
svg text { font: 12px ui-monospace, monospace; fill: var(--ink); text-anchor: middle; }
svg text.left { text-anchor: end; } svg text.right { text-anchor: start; }
svg .edge { stroke: var(--faint); fill: none; stroke-width: 1; }
svg .input { fill: none; stroke: var(--faint); stroke-dasharray: 3 2; } svg .operator { fill: var(--box); }
svg .planted { fill: var(--mark); } svg .result { fill: none; stroke: var(--good); }
svg .bar, svg .span { fill: var(--bar); } svg .span { stroke: var(--paper); stroke-width: .5; }
"""


@dataclass(frozen=True)
class Section:
    """A part of the page.

    Attributes:
        title: its heading.
        blocks: HTML, from ``table``, ``drawing`` and ``preformatted``.
        text: a sentence below the heading, plain text.
    """

    title: str
    blocks: Sequence[str]
    text: str = ""


def table(headers: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    """A table of plain texts and numbers; the words "right" and "WRONG" get their colours."""
    head = "".join(f"<th>{escape(str(cell))}</th>" for cell in headers)
    body = "\n".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>'


def _cell(value: object) -> str:
    text = escape(str(value))
    colour = "bad" if "WRONG" in text else "good" if text == "right" else ""
    return f'<td class="{colour}">{text}</td>' if colour else f"<td>{text}</td>"


def drawing(svg: str, caption: str) -> str:
    """A drawing of this package with a line under it."""
    return f'<figure><div class="wide">{svg}</div><figcaption>{escape(caption)}</figcaption></figure>'


def preformatted(text: str, summary: str = "") -> str:
    """Text as it is, folded below a summary if there is one."""
    block = f'<div class="wide"><pre>{escape(text)}</pre></div>'
    return f"<details><summary>{escape(summary)}</summary>{block}</details>" if summary else block


def render_page(title: str, verdict: str, *, good: bool, facts: Sequence[str], sections: Sequence[Section]) -> str:
    """The page.

    Args:
        title: of the page.
        verdict: one sentence, at the top.
        good: whether it is good news.
        facts: lines below it: target, versions, seed.
        sections: in order; one without blocks is left out.
    """
    parts = [
        f"<section><h2>{escape(section.title)}</h2>"
        + (f'<p class="faint">{escape(section.text)}</p>' if section.text else "")
        + "\n".join(section.blocks)
        + "</section>"
        for section in sections
        if section.blocks
    ]
    lines = "".join(f"<p class='faint'>{escape(fact)}</p>" for fact in facts)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title><style>{_STYLE}</style></head>
<body><h1>{escape(title)}</h1><p class="{"good" if good else "bad"}">{escape(verdict)}</p>{lines}
{"".join(parts)}
</body></html>
"""
