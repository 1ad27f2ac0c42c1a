"""The page of systematic mutants from a campaign: ``python -m npugraph_ex_conformance.mutation.table DIR/results.jsonl FILE``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from npugraph_ex_conformance.words import words

_BEGIN, _END = "<!-- table of kills: written by mutation/table.py -->", "<!-- end of the table of kills -->"


def score_rows(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A row a part: how many of its faults were made, noticed, run by no example, and survived."""
    yield "| part | faults | noticed | run by no example | survivors | score | score of those that are run |"
    yield "|---|---|---|---|---|---|---|"
    parts = sorted({row["value"]["part"] for row in rows})
    for name in (*parts, "all"):
        own = [row["value"] for row in rows if name in {"all", row["value"]["part"]}]
        noticed, missed = sum(bool(value["by"]) for value in own), sum(not value["examples"] for value in own)
        run = len(own) - missed
        shares = f"{noticed / len(own):.0%} | {noticed / run:.0%}" if run else "0% |"
        yield f"| {name} | {len(own)} | {noticed} | {missed} | {run - noticed} | {shares} |"


def page_rows(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The table of scores, then the survivors and what no example runs, by part."""
    yield from score_rows(rows)
    for part in sorted({row["value"]["part"] for row in rows}):
        left = [row for row in rows if row["value"]["part"] == part and not row["value"]["by"]]
        for title, run in (("Survivors in", True), ("Run by no example in", False)):
            names = sorted(row["label"] for row in left if bool(row["value"]["examples"]) == run)
            if names:
                yield from ("", f"{title} {part}:", "", "```text", *names, "```")


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
    results = ("results", "the results.jsonl of a campaign of systematic-mutants")
    main(*words("npugraph_ex_conformance.mutation.table", __doc__, results, ("page", "the page that has the tables")))
