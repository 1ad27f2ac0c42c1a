"""Which ratios and counts of a run are worse than those of an earlier one, and the history of runs."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from measured_tables import Saved, row_name

LESS_IS_BETTER = frozenset({
    "kernels", "copies", "bytes", "MB", "pool bytes", "pool MiB", "modelled us", "beyond the floor", "of the floor", "of aot_eager",
    "warm of cold", "session of compiled", "of torch's", "times",
})  # fmt: skip
MORE_IS_BETTER = frozenset({"below bundled", "session below bundled", "speed-up on the device"})
"""The columns that are the same on every machine; times are not."""


def worse(now: Saved, earlier: Saved, percent: float) -> list[str]:
    """The figures of a run that are worse than an earlier run's by more than so many percent, in words."""
    known = {(title.lower(), row_name(row)): row for title, rows in earlier.rows.items() for row in rows}
    return [
        f"{title}, {', '.join(str(part) for part in row_name(row) if part is not None)}: {column} {value:.2f}, before {before:.2f}"
        for title, rows in now.rows.items()
        for row in rows
        for column, value in row.items()
        if _is_worse(
            column, value, before := known.get((title.lower(), row_name(row)), {}).get(column), 1 + percent / 100
        )
    ]


def _is_worse(column: str, now: Any, before: Any, allowed: float) -> bool:
    if not isinstance(now, (int, float)) or not isinstance(before, (int, float)):
        return False
    least, most = (before, now) if column in LESS_IS_BETTER else (now, before)
    return column in LESS_IS_BETTER | MORE_IS_BETTER and most > allowed * least


def remember(run: Saved, history: Path) -> None:
    """Add a run to a history: one line of JSON a run, with the time."""
    line = {"when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "about": run.about, "tables": run.rows}
    with history.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
