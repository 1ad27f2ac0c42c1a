"""Reports as pages: blocks (tables, figures, drawings, text) under headings, in one look, as HTML and as plain text.

A page is one HTML document without scripts, fonts or network access. It follows the reader's light or dark scheme, fits a
phone, prints, and is read by keyboard and by screen readers. In Jupyter a page shows itself below its cell.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from typing import TYPE_CHECKING, Any

from tabulate import tabulate

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

__all__ = ["Drawing", "Facts", "Page", "PageTable", "Section", "Verbatim", "framed"]


_ROOM = 16
"""The least columns of a terminal for each column of a table."""
_ENDLESS = 10_000


class _PagePart:
    """A part of a section: `str` gives plain text; the template asks `__html__` for its macro of the same name."""

    def __html__(self) -> str:
        return str(getattr(_template().module, type(self).__name__.lower())(self))


@dataclass(frozen=True)
class PageTable(_PagePart):
    """Rows of plain texts and numbers; a row with the word WRONG gets its colour. A page leaves a table without rows out.

    Attributes:
        headers: one a column.
        rows: cells in the order of the columns.
        caption: says what the table is where its section has several.
    """

    headers: Sequence[object]
    rows: Sequence[Sequence[object]]
    caption: str = ""

    def __bool__(self) -> bool:
        return bool(self.rows)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """For a terminal: cells are folded to its width; where that leaves no room for words, a list."""
        from rich.table import Table
        from rich.text import Text

        table = Table(title=self.caption or None, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for header in self.headers:
            table.add_column(str(header), overflow="fold")
        for row in self.rows:
            table.add_row(*(Text(str(value)) for value in row))
        unfolded = console.measure(table, options=options.update(width=_ENDLESS)).maximum
        if options.max_width >= min(unfolded, _ROOM * len(self.headers)):
            yield table
            return
        for first, *others in self.rows:
            said = [f"{name}: {value}" for name, value in zip(self.headers[1:], others, strict=True) if str(value)]
            line = f"  {', '.join(said)}"
            yield Text(str(first), "bold")
            yield Text(line if len(line) <= options.max_width else "\n".join(f"  {part}" for part in said))

    def __str__(self) -> str:
        drawn: str = tabulate(self.rows, headers=[*map(str, self.headers)], tablefmt="simple", disable_numparse=True)
        return f"{self.caption}\n\n{drawn}" if self.caption else drawn


@dataclass(frozen=True)
class Facts(_PagePart):
    """Names and values; on a page, cards if the values are short."""

    pairs: Sequence[tuple[str, object]]

    def __str__(self) -> str:
        return str(tabulate(self.pairs, tablefmt="plain", disable_numparse=True))


@dataclass(frozen=True)
class Drawing(_PagePart):
    """Trusted HTML, from ``framed`` or a chart, with a line under it, which is all that plain text shows of it."""

    drawn: str
    caption: str = ""

    def __str__(self) -> str:
        return self.caption


@dataclass(frozen=True)
class Verbatim(_PagePart):
    """Text as it is; folded below a summary if there is one."""

    text: str
    summary: str = ""

    def __str__(self) -> str:
        return f"{self.summary}\n{self.text}" if self.summary else self.text


@dataclass(frozen=True)
class Section:
    """A part of a page.

    Attributes:
        title: its heading.
        blocks: what it shows; a section without any is left out.
        text: a sentence below the heading.
    """

    title: str
    blocks: Sequence[_PagePart]
    text: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """For a terminal, in its width."""
        from rich.text import Text

        yield Text(f"\n{self.title}", "bold")
        for part in filter(None, (self.text, *self.blocks)):
            yield Text()
            yield part if isinstance(part, PageTable) else Text(str(part))

    def __str__(self) -> str:
        return "\n\n".join(str(part) for part in (self.title, self.text, *self.blocks) if str(part))


@dataclass(frozen=True)
class Page:
    """A report.

    Attributes:
        title: its heading.
        sections: in order.
        verdict: one sentence at the top.
        good: whether the verdict is good news; None if it is neither.
        facts: lines below it: target, versions, seed.
    """

    title: str
    sections: Sequence[Section]
    verdict: str = ""
    good: bool | None = None
    facts: Sequence[str] = ()

    @property
    def shown(self) -> list[Section]:
        """The sections that have something to show."""
        kept = (Section(part.title, [block for block in part.blocks if block], part.text) for part in self.sections)
        return [section for section in kept if section.blocks]

    def html(self) -> str:
        """The document."""
        return str(_template().render(page=self))

    def __str__(self) -> str:
        return "\n\n".join(str(part) for part in (self.title, self.verdict, *self.facts, *self.shown) if str(part))

    def _repr_html_(self) -> str:
        """For Jupyter: in a frame of its own, so that the page's style leaves the notebook alone."""
        frame = 'style="width: 100%; height: 38rem; border: 0" loading="lazy"'
        return f'<iframe title="{escape(self.title)}" srcdoc="{escape(self.html())}" {frame}></iframe>'


def framed(kind: str, label: str, width: float, height: float, parts: Iterable[str]) -> str:
    """An SVG element of this size in pixels; ``label`` is read to those who cannot see it."""
    head = (
        f'<svg class="{kind}" role="img" aria-label="{escape(label)}" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}">'
    )
    return "\n".join([head, *parts, "</svg>"])


@cache
def _template() -> Any:
    import jinja2

    loader = jinja2.PackageLoader("npu_emulator.pages", ".")
    return jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True).get_template(
        "page.html"
    )
