"""What a campaign says at its end: causes, coverage over time, throughput, scaling; on the terminal and as one page."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from npu_emulator.pages import Drawing, Page, PageTable, Section, Verbatim, framed
from npugraph_ex._plurals import counted
from npugraph_ex_conformance.campaign.ledger import ENDED, SKIPPED, Ledger, Row
from npugraph_ex_conformance.upstream.outcome import cause_of

KIND_HEADERS = ("kind", "items", "wrong", "skipped", "processor s", "a second a core", "slowest s")
RUN_HEADERS = (
    "run",
    "items",
    "wall s",
    "nodes",
    "cores",
    "busy",
    "driver ms an item",
    "cores that one driver feeds",
    "batches lost",
)
_FOLDER, _DIGITS = re.compile(r"/\S*/"), re.compile(r"\d+")
_POINTS = 200
_WIDE, _HIGH, _LEFT, _BELOW = 640, 220, 70, 30
_NAMED = 8


def causes(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """What is wrong, grouped: numbers, addresses and folders in a message do not tell two causes apart; most frequent first."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row.is_wrong:
            how = row.state if row.state in ENDED else ""
            text = cause_of(how, _DIGITS.sub("N", _FOLDER.sub("", row.message))).removeprefix(": ")
            found.setdefault(f"{row.kind}: {text}", []).append(row)
    return dict(sorted(found.items(), key=lambda pair: -len(pair[1])))


def kind_rows(ledger: Ledger) -> list[tuple[object, ...]]:
    """A row for each kind."""
    table_rows: list[tuple[object, ...]] = []
    for kind, count in ledger.plan.items():
        own = [row for row in ledger.rows if row.kind == kind]
        seconds = sum(row.seconds for row in own)
        wrong = sum(row.is_wrong for row in own)
        skipped = sum(row.state == SKIPPED for row in own)
        rate = f"{len(own) / seconds:.1f}" if seconds else ""
        slowest = max((row.seconds for row in own), default=0.0)
        table_rows.append(
            (
                kind,
                f"{len(own)} of {count}",
                f"{wrong} WRONG" if wrong else 0,
                skipped,
                f"{seconds:.1f}",
                rate,
                f"{slowest:.2f}",
            )
        )
    return table_rows


def run_rows(ledger: Ledger) -> list[tuple[object, ...]]:
    """A row for each run of the campaign: how busy the cores were, and how many of them one driver could keep busy."""
    runs: list[dict[str, Any]] = [line["run"] for line in ledger.notes if "run" in line]
    table_rows: list[tuple[object, ...]] = []
    mean = sum(row.seconds for row in ledger.rows) / max(len(ledger.rows), 1)
    for number, run in enumerate(runs, 1):
        each = run["driver"] / max(run["items"], 1)
        busy = run["items"] * mean / max(run["wall"] * run["cores"], 1e-9)
        feeds = f"{mean / each:.0f}" if each else ""
        taken = f"{run['wall']:.0f}", len(run["nodes"]), run["cores"], f"{busy:.0%}", f"{1000 * each:.3f}"
        table_rows.append((number, run["items"], *taken, feeds, run["lost"]))
    return table_rows


def verdict(ledger: Ledger) -> tuple[str, bool]:
    """The campaign in a sentence, and whether that is good news."""
    states = Counter(row.state for row in ledger.rows)
    said = ", ".join(f"{count} {state}" for state, count in states.most_common())
    wrong = sum(row.is_wrong for row in ledger.rows)
    if ledger.left:
        return f"{counted(len(ledger.rows), 'item')} ({said or 'none'}), {ledger.left} left", not wrong
    return f"every one of {counted(len(ledger.rows), 'item')} is accounted for: {said}", not wrong


def coverage(rows: Sequence[Row]) -> list[tuple[int, int]]:
    """After how many items how many different features had been reached."""
    seen: set[str] = set()
    points = [(0, 0)]
    every = max(len(rows) // _POINTS, 1)
    for position, row in enumerate(rows, 1):
        seen.update(row.new)
        if position % every == 0 or position == len(rows):
            points.append((position, len(seen)))
    return points


def page(ledger: Ledger) -> str:
    """The text of the page."""
    sentence, good = verdict(ledger)
    facts = [" · ".join(f"{name} {value}" for name, value in ledger.settings.items() if value not in ("", None))]
    scripts = {line["shrunk"]: line["script"] for line in ledger.notes if line.get("script")}
    failures = [block for cause, rows in causes(ledger.rows).items() for block in _cause(cause, rows, scripts)]
    points = coverage(ledger.rows)
    sections = [
        Section("What is wrong, by cause", failures),
        Section("Throughput", [PageTable(KIND_HEADERS, kind_rows(ledger))], "Processor seconds are those of the items alone."),
        Section(
            "Coverage over time",
            [Drawing(_curve(points), f"{points[-1][1]} after {counted(points[-1][0], 'item')}")] if points[-1][1] else [],
            "Features that items reached: pairs of operators that follow each other, what passes did, reasons of near-misses.",
        ),
        Section("Scaling", [PageTable(RUN_HEADERS, run_rows(ledger))], "Busy: of the cores' time, what items took."),
        Section("Nodes", [PageTable(("node", "items"), Counter(row.node for row in ledger.rows if row.node).most_common())]),
    ]  # fmt: skip
    return Page("Campaign", sections, sentence, good, facts).html()


def _cause(cause: str, rows: Sequence[Row], scripts: dict[str, str]) -> list[Verbatim]:
    named = ", ".join(row.item for row in rows[:_NAMED]) + (", …" if len(rows) > _NAMED else "")
    blocks = [Verbatim(f"{named}\n\n{rows[0].message}", f"{cause} ({counted(len(rows), 'item')})")]
    script = scripts.get(rows[0].item)
    return (
        [*blocks, Verbatim(script, f"smallest like {rows[0].item}: a script that reproduces it")] if script else blocks
    )


def _curve(points: Sequence[tuple[int, int]]) -> str:
    """The SVG of a curve that begins at zero."""
    right, top = max(points[-1][0], 1), max(points[-1][1], 1)
    wide, high = _WIDE - _LEFT - 10, _HIGH - _BELOW - 10
    line = " ".join(f"{_LEFT + wide * x / right:.1f},{10 + high * (1 - y / top):.1f}" for x, y in points)
    parts = [f'<polyline class="edge" points="{line}"/>']
    for share in (0.0, 0.5, 1.0):
        y = 10 + high * (1 - share)
        parts.append(f'<text class="left" x="{_LEFT - 8}" y="{y + 4:.1f}">{round(top * share)}</text>')
        anchor = ("right", "", "left")[int(share * 2)]
        parts.append(
            f'<text class="{anchor}" x="{_LEFT + wide * share:.1f}" y="{_HIGH - 8}">{round(right * share)}</text>'
        )
    return framed("curve", "coverage over items", _WIDE, _HIGH, parts)
