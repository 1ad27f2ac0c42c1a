"""The page of systematic mutants from a campaign: ``python -m npugraph_ex_conformance.mutation.table DIR/results.jsonl FILE``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_BEGIN, _END = "<!-- table of kills: written by mutation/table.py -->", "<!-- end of the table of kills -->"


def score_rows(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A row a part: how many of its faults were made, noticed, and not."""
    yield "| part | faults made | noticed | survivors | score |"
    yield "|---|---|---|---|---|"
    parts = sorted({row["value"]["part"] for row in rows})
    for name in (*parts, "all"):
        own = [row for row in rows if name in {"all", row["value"]["part"]}]
        killed = sum(bool(row["value"]["by"]) for row in own)
        yield f"| {name} | {len(own)} | {killed} | {len(own) - killed} | {killed / len(own):.0%} |"


def page_rows(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The table of scores, then the survivors by part."""
    yield from score_rows(rows)
    for part in sorted({row["value"]["part"] for row in rows}):
        left = sorted(row["label"] for row in rows if row["value"] == {"part": part, "by": ""})
        if left:
            yield from ("", f"Survivors in {part}:", "", "```text", *left, "```")


def read(file: Path) -> list[dict[str, Any]]:
    """The faults of a campaign that were looked for; not those that no function of the running program has."""
    lines = (json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.endswith("}"))
    return [line for line in lines if line.get("kind") == "systematic-mutants" and line.get("value")]


def main(results: str, page: str) -> None:
    """Write the tables between the two comments of the page."""
    path = Path(page)
    before, _, rest = path.read_text(encoding="utf-8").partition(_BEGIN)
    _, _, after = rest.partition(_END)
    rows = "\n".join(page_rows(read(Path(results))))
    path.write_text(f"{before}{_BEGIN}\n\n{rows}\n\n{_END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
