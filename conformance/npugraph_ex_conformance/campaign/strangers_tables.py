"""The tables of programs by others from a campaign: ``python -m npugraph_ex_conformance.campaign.strangers_tables RESULTS PAGE``.

RESULTS is the ``results.jsonl`` of ``npugraph-ex campaign opinfo architectures``.
"""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from npugraph_ex_conformance.words import words

_USES = ("forward", "session", "generate", "train", "generate lifted")
_KNOWN = Path(__file__).with_name("strangers_known.toml")


@dataclass(frozen=True)
class StrangersDifference:
    """An entry of the file of known differences.

    Attributes:
        names: operators, or architectures.
        text: what the difference says of itself, in part.
        reason: one sentence.
        link: of the report or of the code; empty where there is none.
    """

    names: tuple[str, ...]
    text: str
    reason: str
    link: str = ""

    def explains(self, row: dict[str, Any]) -> bool:
        """Whether a row differs in this way."""
        return _differs(row) and _name(row) in self.names and self.text in _text(row)


def known_differences() -> list[StrangersDifference]:
    """The entries of the file, in its order."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib  # the extra `conformance` brings it
    entries = tomllib.loads(_KNOWN.read_text(encoding="utf-8"))["difference"]
    return [StrangersDifference(tuple(entry.pop("names")), **entry) for entry in entries]


def done_line(plan: Mapping[str, int], rows: Mapping[str, Sequence[dict[str, Any]]], torch: str) -> str:
    """How much of the campaign has an answer."""
    parts = [f"{len(rows[kind])} of {plan[kind]} items of `{kind}`" for kind in rows if kind in plan]
    return f"With torch {torch} {' and '.join(parts)} have an answer; the campaign goes on with `--resume`."


def operator_rows(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A row a dtype: how many cases are equal to eager mode, or to torch's plain backend, or are refused, or differ."""
    yield "| dtype | cases | equal to eager mode | equal to `aot_eager` alone | refused by eager mode | differs otherwise |"
    yield "|---|---|---|---|---|---|"
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        for name in (row["label"].split()[-2], "all"):
            counts[name][_state(row)] += 1
    for name, count in sorted(counts.items(), key=lambda item: (item[0] == "all", item[0])):
        states = " | ".join(str(count[state]) for state in ("equal", "upstream", "skipped", "wrong"))
        yield f"| {name} | {count.total()} | {states} |"


def difference_rows(rows: Sequence[dict[str, Any]], known: Sequence[StrangersDifference]) -> Iterator[str]:
    """The differences from eager mode, each with the file's reason and its operators or architectures."""
    named: dict[tuple[str, str], set[str]] = defaultdict(set)
    for row in filter(_differs, rows):
        whose = "not `aot_eager`" if row["message"] else "`aot_eager`, too"
        of = next((entry for entry in known if entry.explains(row)), None)
        why = f"{of.reason} {of.link}".strip() if of else f"**not explained**: {_kind(_text(row))}"
        named[whose, why].add(_name(row))
    yield "| whose | difference | operators or architectures |"
    yield "|---|---|---|"
    for (whose, why), names in sorted(named.items()):
        yield f"| {whose} | {why} | {', '.join(sorted(names))} |"


def stale(rows: Sequence[dict[str, Any]], known: Sequence[StrangersDifference]) -> Iterator[str]:
    """What the file of known differences names although it ran and none of its rows differs so."""
    ran = {_name(row) for row in rows}
    for entry in known:
        shown = {_name(row) for row in rows if entry.explains(row)}
        yield from (f"{name}: {entry.text}" for name in entry.names if name in ran and name not in shown)


def architecture_rows(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A row an architecture: each of its uses."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    words = {"equal": "equal", "upstream": "as `aot_eager`", "skipped": "—", "wrong": "**differs**"}
    for row in rows:
        name, _, use = row["label"].rpartition(": ")
        found[name][use] = words[_state(row)]
    yield "| architecture | three calls | of a session | six new tokens | two steps of training | six new tokens, lifted |"
    yield "|---|---|---|---|---|---|"
    for name, uses in sorted(found.items()):
        yield f"| {name} | {' | '.join(uses.get(use, 'not run') for use in _USES)} |"


def _state(row: dict[str, Any]) -> str:
    if row["state"] == "skipped":
        return "skipped"
    if row["state"] != "passed":
        return "wrong"
    return "upstream" if row["value"]["upstream"] else "equal"


def _differs(row: dict[str, Any]) -> bool:
    return _state(row) in {"upstream", "wrong"}


def _text(row: dict[str, Any]) -> str:
    return str(row["message"] or row["value"]["upstream"][0])


def _name(row: dict[str, Any]) -> str:
    """The operator, or the architecture."""
    return str(row["label"].rpartition(": ")[0] or row["label"].split()[0])


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
        row.setdefault("label", f"item-{row.get('number', 0)} unknown static")  # it ended before it had a name
    known, every = known_differences(), [*rows["opinfo"], *rows["architectures"]]
    for entry in stale(every, known):
        sys.stderr.write(f"stale: {entry}\n")
    done = done_line(answers[0]["plan"], rows, answers[0]["settings"]["torch"])
    tables: dict[str, Iterable[str]] = {
        "operators": [done, "", *operator_rows(rows["opinfo"])],
        "differences": difference_rows(every, known),
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
    results = ("results", "the results.jsonl of the campaign")
    main(
        *words(
            "npugraph_ex_conformance.campaign.strangers_tables",
            __doc__,
            results,
            ("page", "the page that has the tables"),
        )
    )
