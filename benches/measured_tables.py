"""The tables that a run of the benches ends with, the JSON that keeps them, and how two such files compare."""

from __future__ import annotations

import contextlib
import json
import os
import platform
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tabulate import tabulate
from typing_extensions import Self

from npu_emulator import pages
from npugraph_ex._version import __version__

Rows = dict[str, list[dict[str, Any]]]


class Table:
    """Rows by title; call it to add one."""

    def __init__(self) -> None:
        self.rows: Rows = {}

    def __call__(self, title: str, /, **row: Any) -> None:
        """Add a row to the table of this title."""
        self.rows.setdefault(title, []).append(row)


def machine() -> dict[str, str]:
    """The versions, and the class of machine; not which one."""
    names = ("torch", "torch_npu")
    return {
        **{name: version(name) for name in names},
        "npugraph-ex": __version__,  # of the code that runs: an editable install keeps the version with which it was made
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, emulated device",
    }


@dataclass(frozen=True)
class Saved:
    """The tables of one run.

    Attributes:
        about: versions and machine class, by name.
        rows: of each table, by title.
    """

    about: dict[str, str]
    rows: Rows

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read what `write` wrote, or, of a file `*.md`, the tables of a page.

        Raises:
            OSError: there is no such file.
            ValueError: it is something else.
        """
        if path.suffix == ".md":
            return cls._of_page(path)
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict) or not {"about", "tables"} <= content.keys():
            raise ValueError(f"{path} has no tables")
        return cls(content["about"], content["tables"])

    @classmethod
    def _of_page(cls, path: Path) -> Self:
        about, *sections = path.read_text(encoding="utf-8").split("### ")
        rows: Rows = {}
        for section in sections:
            title, *lines = section.splitlines()
            head, _, *cells = [
                [cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")
            ]
            rows[title] = [dict(zip(head, map(_read, row), strict=True)) for row in cells]
        if not rows:
            raise ValueError(f"{path} has no tables")
        return cls({"page": about.strip()}, rows)

    def write(self, path: Path) -> None:
        """Write all of it as JSON."""
        path.write_text(json.dumps({"about": self.about, "tables": self.rows}, indent=1) + "\n", encoding="utf-8")

    def text(self) -> str:
        """All tables, each under its title."""
        return "\n\n".join([self._about(), *(f"{title}\n{_drawn(rows)}" for title, rows in self.rows.items())])

    def html(self) -> str:
        """All tables as a page that stands alone."""
        sections = []
        for title, rows in self.rows.items():
            columns = list(dict.fromkeys(column for row in rows for column in row))
            cells = [[_shown(row.get(column, "")) for column in columns] for row in rows]
            sections.append(pages.Section(title[0].upper() + title[1:], [pages.PageTable(columns, cells)]))
        return pages.Page("Benches", sections, facts=[self._about()]).html()

    def page(self) -> str:
        """All tables in Markdown, for the documentation."""
        parts = [f"{self._about()}."]
        parts += [f"### {title[0].upper()}{title[1:]}\n\n{_drawn(rows, 'github')}" for title, rows in self.rows.items()]
        return "\n\n".join(parts) + "\n"

    def beside(self, earlier: Saved) -> str:
        """All tables, each figure with how many times the earlier one it is; rows are found again by what they name."""
        known = {(title.lower(), row_name(row)): row for title, rows in earlier.rows.items() for row in rows}
        rows = {
            title: [_compared(row, known.get((title.lower(), row_name(row)), {})) for row in rows]
            for title, rows in self.rows.items()
        }
        heads = f"now:     {self._about()}\nearlier: {earlier._about()}\nin brackets: how many times the earlier figure"
        return "\n\n".join([heads, *(f"{title}\n{_drawn(table, numbers=False)}" for title, table in rows.items())])

    def _about(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.about.items())


_NAMING = (
    "layers",
    "sizes",
    "nodes",
    "graph",
    "model",
    "batch",
    "pass",
    "part",
    "backend",
    "kind",
    "level",
    "stage",
    "fusions",
)
"""The columns that say what a row is about."""


def _shown(value: object) -> object:
    return f"{value:.2f}" if isinstance(value, float) else value


def _read(cell: str) -> object:
    """A number of a page, or a word."""
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(cell)
    return cell or None


def row_name(row: dict[str, Any]) -> tuple[object, ...]:
    """What a row is about: rows of two runs with this in common are compared."""
    return tuple(row.get(column) for column in _NAMING)


def _compared(row: dict[str, Any], earlier: dict[str, Any]) -> dict[str, Any]:
    def cell(column: str, value: Any) -> Any:
        before = earlier.get(column)
        if column in _NAMING or not isinstance(value, (int, float)):
            return value
        return f"{value:.2f} ({value / before:.2f})" if before else f"{value:.2f}"

    return {column: cell(column, value) for column, value in row.items()}


def _drawn(rows: list[dict[str, Any]], style: str = "simple", *, numbers: bool = True) -> str:
    shown = [
        {column: _shown(value) for column, value in row.items()} for row in rows
    ]  # beside a word no number is rounded
    return tabulate(shown, headers="keys", floatfmt=".2f", tablefmt=style, disable_numparse=not numbers)
