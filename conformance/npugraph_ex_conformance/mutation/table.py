"""The page of systematic mutants, from the results of a campaign and the answers of the unit tests about what it left."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from npugraph_ex_conformance.mutation.arguments import ArguedEffect, arguments, identity_of, refuted
from npugraph_ex_conformance.mutation.sites import FaultIdentity
from npugraph_ex_conformance.words import words

_BEGIN, _END = "<!-- table of kills: written by mutation/table.py -->", "<!-- end of the table of kills -->"
_ARGUED = {"Equivalent, as argued, in": ("none",), "Speed or reports only, as argued, in": ("speed", "report")}


def score_rows(
    rows: Sequence[dict[str, Any]],
    argued: Mapping[FaultIdentity, ArguedEffect],
    unit_tests: Mapping[FaultIdentity, str],
) -> Iterator[str]:
    """A row a part: how many of its faults were made, noticed, argued, run by no example, and survived.

    Args:
        rows: of the campaign.
        argued: what no value can show.
        unit_tests: which unit test noticed a fault that no example did; empty where none.
    """
    yield (
        "| part | faults | noticed | equivalent (argued) | speed or report only (argued) | run by no example | survivors | score "
        "| score of those that are run | noticed by unit tests alone | score with unit tests |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|---|"
    parts = sorted({row["value"]["part"] for row in rows})
    for name in (*parts, "all"):
        own = [row for row in rows if name in {"all", row["value"]["part"]}]
        effects = Counter(argued[identity_of(row)].effect for row in own if identity_of(row) in argued)
        open_ = [row["value"] for row in own if identity_of(row) not in argued]
        noticed, missed = sum(bool(value["by"]) for value in open_), sum(not value["examples"] for value in open_)
        run = len(open_) - missed
        tested = sum(not row["value"]["by"] and bool(unit_tests.get(identity_of(row))) for row in own)
        shares = f"{noticed / len(open_):.0%} | {noticed / run:.0%}" if run else "0% |"
        shares += f" | {tested} | {(noticed + tested) / max(1, len(open_)):.0%}"
        seen = effects["speed"] + effects["report"]
        yield (
            f"| {name} | {len(own)} | {noticed} | {effects['none']} | {seen} | {missed} | {run - noticed} | {shares} |"
        )


def page_rows(
    rows: Sequence[dict[str, Any]],
    argued: Mapping[FaultIdentity, ArguedEffect],
    unit_tests: Mapping[FaultIdentity, str],
) -> Iterator[str]:
    """The table of scores, then by part what no example notices: what unit tests do, the survivors, and what is argued."""
    yield from score_rows(rows, argued, unit_tests)
    for part in sorted({row["value"]["part"] for row in rows}):
        left = [row for row in rows if row["value"]["part"] == part and not row["value"]["by"]]
        tested = {identity_of(row) for row in left if unit_tests.get(identity_of(row))}
        yield from _listed(
            f"Noticed by unit tests alone in {part}",
            [f"{_named(row)}\n    {unit_tests[identity_of(row)]}" for row in left if identity_of(row) in tested],
        )
        unargued = [row for row in left if identity_of(row) not in argued and identity_of(row) not in tested]
        for title, run in (("Survivors in", True), ("Run by no example in", False)):
            yield from _listed(
                f"{title} {part}", [_named(row) for row in unargued if bool(row["value"]["examples"]) == run]
            )
        for title, effects in _ARGUED.items():
            of_these = [(row, argued[identity_of(row)]) for row in left if identity_of(row) in argued]
            yield from _listed(
                f"{title} {part}", [f"{_named(row)}\n    {one.why}" for row, one in of_these if one.effect in effects]
            )


def _listed(title: str, names: Sequence[str]) -> Iterator[str]:
    if names:
        yield from ("", f"{title}:", "", "```text", *sorted(names), "```")


def _named(row: Mapping[str, Any]) -> str:
    """The fault, and what is changed, which the name does not say."""
    return f"{row['label']}: {identity_of(row).text}"


def read(file: Path) -> list[dict[str, Any]]:
    """The faults of a campaign that were looked for; not those that no function of the running program has."""
    lines = (json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.endswith("}"))
    return [line for line in lines if line.get("kind") == "systematic-mutants" and line.get("value")]


def answers_of(file: Path) -> list[dict[str, Any]]:
    """What `unit_tests` has written: ``fault``, ``tests`` (how many looked), ``by`` (the test that fails, or empty)."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.endswith("}")]


def main(results: str, page: str, unit_tests: str) -> None:
    """Write the tables between the two comments of the page.

    Raises:
        ValueError: an example noticed a fault of which it is argued that nobody can.
    """
    path, found, argued = Path(page), read(Path(results)), arguments()
    wrong = refuted(found, argued)
    if wrong:
        raise ValueError("\n".join(wrong))
    before, _, rest = path.read_text(encoding="utf-8").partition(_BEGIN)
    _, _, after = rest.partition(_END)
    tested = {FaultIdentity(*row["fault"]): row["by"] for row in answers_of(Path(unit_tests))} if unit_tests else {}
    rows = "\n".join(page_rows(found, argued, tested))
    path.write_text(f"{before}{_BEGIN}\n\n{rows}\n\n{_END}{after}", encoding="utf-8")


if __name__ == "__main__":
    results = ("results", "the results.jsonl of a campaign of systematic-mutants")
    page = ("page", "the page that has the tables")
    tests = ("", "what mutation.unit_tests has written")
    main(*words("npugraph_ex_conformance.mutation.table", __doc__, results, page, unit_tests=tests))
