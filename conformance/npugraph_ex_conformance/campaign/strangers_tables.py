"""The tables of programs by others from a campaign: ``python -m npugraph_ex_conformance.campaign.strangers_tables RESULTS PAGE``.

RESULTS is the ``results.jsonl`` of ``npugraph-ex campaign opinfo architectures``.
"""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_USES = ("forward", "generate", "train")


def operator_rows(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A row a dtype: how many cases are equal to eager mode, or to torch's plain backend, or are refused, or differ."""
    yield "| dtype | cases | equal to eager mode | equal to `aot_eager` alone | refused by eager mode | wrong |"
    yield "|---|---|---|---|---|---|"
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        for name in (row["label"].split()[-2], "all"):
            counts[name][_state(row)] += 1
    for name, count in sorted(counts.items(), key=lambda item: (item[0] == "all", item[0])):
        states = " | ".join(str(count[state]) for state in ("equal", "upstream", "skipped", "wrong"))
        yield f"| {name} | {count.total()} | {states} |"


def difference_rows(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The differences from eager mode that `aot_eager` has, too, and those that it does not have; the operators of each."""
    named: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        if _state(row) in {"upstream", "wrong"}:
            text = row["message"] or row["value"]["upstream"][0]
            named[f"{'' if row['message'] else '`aot_eager`, too: '}{_kind(text)}"].add(row["label"].split()[0])
    yield "| difference | operators |"
    yield "|---|---|"
    for kind, names in sorted(named.items()):
        yield f"| {kind} | {', '.join(sorted(names))} |"


def architecture_rows(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A row an architecture: each of its uses."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    words = {"equal": "equal", "upstream": "as `aot_eager`", "skipped": "—", "wrong": "**differs**"}
    for row in rows:
        name, _, use = row["label"].rpartition(": ")
        found[name][use] = words[_state(row)]
    yield "| architecture | three calls | six new tokens | two steps of training |"
    yield "|---|---|---|---|"
    for name, uses in sorted(found.items()):
        yield f"| {name} | {' | '.join(uses.get(use, 'not run') for use in _USES)} |"


def _state(row: dict[str, Any]) -> str:
    if row["state"] == "skipped":
        return "skipped"
    if row["state"] != "passed":
        return "wrong"
    return "upstream" if row["value"]["upstream"] else "equal"


def _kind(text: str) -> str:
    """A difference without its numbers and beyond its first line."""
    return "".join("N" if letter.isdigit() else letter for letter in text.splitlines()[0])[:100].replace("|", "/")


def main(results: str, page: str) -> None:
    """Write each table between its two comments in the page."""
    answers = [
        json.loads(line) for line in Path(results).read_text(encoding="utf-8").splitlines() if line.endswith("}")
    ]
    rows = {kind: [row for row in answers if row.get("kind") == kind] for kind in ("opinfo", "architectures")}
    for row in (row for of_kind in rows.values() for row in of_kind):
        row.setdefault("message", "")
    tables = {
        "operators": operator_rows(rows["opinfo"]),
        "differences": difference_rows(rows["opinfo"]),
        "architectures": architecture_rows(rows["architectures"]),
    }
    path = Path(page)
    text = path.read_text(encoding="utf-8")
    for name, table in tables.items():
        before, begin, rest = text.partition(f"<!-- table of {name}: written by campaign/strangers_tables.py -->")
        _, end, after = rest.partition(f"<!-- end of the table of {name} -->")
        lines = "\n".join(table)
        text = f"{before}{begin}\n\n{lines}\n\n{end}{after}"
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
