"""The tables that a run of the benches ends with, and the JSON that keeps them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tabulate import tabulate


class Table:
    """Rows by title; call it to add one."""

    def __init__(self) -> None:
        self.rows: dict[str, list[dict[str, Any]]] = {}

    def __call__(self, title: str, /, **row: Any) -> None:
        """Add a row to the table of this title."""
        self.rows.setdefault(title, []).append(row)

    def text(self) -> str:
        """All tables, each under its title."""
        return "\n\n".join(
            f"{title}\n{tabulate(rows, headers='keys', floatfmt='.2f')}" for title, rows in self.rows.items()
        )

    def save(self, path: Path, **about: str) -> None:
        """Write the rows and what is known of the machine as JSON."""
        path.write_text(json.dumps({"about": about, "tables": self.rows}, indent=1), encoding="utf-8")
