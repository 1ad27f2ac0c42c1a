"""The run as one HTML page: `report.html`. Reads the books; runs nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from npu_emulator.clock.picture import chart
from npu_emulator.clock.timeline import Span
from npu_emulator.pages import Drawing, Page, PageTable, Section, Verbatim
from npugraph_ex._plurals import counted
from npugraph_ex.testing import Limits
from npugraph_ex_conformance.reporting.charts import draw_histogram
from npugraph_ex_conformance.reporting.drawing import draw_program
from npugraph_ex_conformance.results import Books, Entry, Finished, Slowest

if TYPE_CHECKING:
    from npugraph_ex_conformance.session import Run

HEADERS = (
    *("pattern", "dtype", "shapes", "programs", "fusions", "near-misses refused", "left alone"),
    *("worst ULP", "eager there", "verdict"),
)
LEGEND = """\
programs             near-misses refused, those left alone, and those with fusions, of which a program may have several.
left alone           has no near-miss, and no pattern that must be fused: integers, streams, a pattern written in a way, or of
                     operands, that its rule may leave.
worst ULP            the largest distance of a result from the float64 reference among those that are not eager mode's to the
                     bit: "equal" where all are. 0.00 is less than half a hundredth.
eager there          eager mode's distance at that element. Where terms cancel, eager mode loses as many digits, and a
                     result may be that far from the reference, and four times as far, and be right."""
_SLOWEST = 12


def pattern_rows(run: Run) -> list[tuple[str | int, ...]]:
    """The table of patterns and capture, as on the terminal."""
    rows: list[tuple[str | int, ...]] = []
    for key, entries in run.books.rows().items():
        worst = max(entries, key=lambda entry: entry.worst_ulp)
        alone = sum(entry.near_miss is None and entry.fusions == 0 for entry in entries)
        failed = sum(bool(entry.failures) for entry in entries)
        refused = sum(entry.near_miss is not None and entry.fusions == 0 for entry in entries)
        rows.append(
            (
                *key, len(entries), sum(entry.fusions for entry in entries), refused, alone,
                f"{worst.worst_ulp:.2f}" if worst.worst_ulp else "equal",
                f"{worst.eager_ulp:.2f}" if worst.worst_ulp else "", f"{failed} WRONG" if failed else "right",
            )
        )  # fmt: skip
    return rows


PASS_HEADERS = ("pass", "changed the graph of", "random", "of streams", "verdict")


def pass_rows(run: Run) -> list[tuple[str | int, ...]]:
    """For every pass, in how many programs it did something, and whether these came out right, as far as it is to blame."""
    from npugraph_ex.passes.pipeline import PIPELINE

    rows: list[tuple[str | int, ...]] = []
    blamed = {test.test: test.failure.guilty for test in run.books.finished if test.failure is not None}
    for pass_ in PIPELINE:
        changed = [entry for entry in run.books.entries if pass_.name in entry.passes]
        streams = sum(entry.route == "streams" for entry in changed)
        failed = sum(bool(entry.failures) and _is_to_blame(pass_.name, blamed.get(entry.test)) for entry in changed)
        verdict = f"{failed} WRONG" if failed else "right" if changed else "nothing to do"
        rows.append((pass_.name, len(changed), len(changed) - streams, streams, verdict))
    return rows


def _is_to_blame(name: str, guilty: str | None) -> bool:
    """Whether a pass is to blame for a failure, or may be: of what was not made small nothing is known."""
    return guilty is None or guilty.partition(":")[0] == f"pass {name}"


RATE_HEADERS = ("mode", "programs", "processor s", "a second a core")


def rate_rows(run: Run) -> list[tuple[str, int, str, str]]:
    """How many programs a second of one core each mode checks, drawing included."""
    modes: dict[str, list[float]] = {}
    for entry in run.books.entries:
        mode, comma, _ = entry.kind.partition(",")
        for row in dict.fromkeys((f"{mode}, all" if comma else mode, entry.kind)) if entry.kind else ():
            modes.setdefault(row, []).append(entry.seconds)
    return [
        (mode, len(seconds), f"{sum(seconds):.1f}", f"{len(seconds) / max(sum(seconds), 1e-9):.1f}")
        for mode, seconds in sorted(modes.items())
    ]


def verdict_of(books: Books, *, tests: int) -> tuple[str, bool | None]:
    """The run in one sentence, and whether that is good news; None of a run that was stopped, whose end is not known.

    Args:
        books: what has happened.
        tests: how many there were to run.
    """
    outcomes = Counter(test.outcome for test in books.finished)
    rest = [f"{outcomes['skipped']} skipped"] * bool(outcomes["skipped"])
    rest += [f"{outcomes['xfailed']} failed as known"] * bool(outcomes["xfailed"])
    others = "".join(f", {part}" for part in rest)
    programs = counted(len(books.entries), "random program")
    if books.failed:
        return f"{len(books.failed)} of {counted(tests, 'test')} failed{others}", False
    if len(books.finished) < tests:
        ran = f"stopped after {len(books.finished)} of {counted(tests, 'test')}{others}, {programs}"
        return f"{ran}: right so far", None
    if not outcomes["passed"]:
        return f"nothing was tested: of {counted(tests, 'test')} none passed{others}", False
    return f"{counted(outcomes['passed'], 'test')} passed{others}, {programs}: everything that ran is right", True


def page(run: Run, *, seconds: float, tests: int) -> str:
    """The text of the page.

    Args:
        run: what has happened.
        seconds: that it took.
        tests: how many there were to run, those that were done before included.
    """
    books = run.books
    wrong = [test for test in books.finished if test.outcome == "failed"]
    verdict, good = verdict_of(books, tests=tests)
    facts = [" · ".join(" ".join(line.split()) for line in run.target.describe().splitlines())]
    facts.append(f"profile {books.run['profile']} · seed {run.seed} · {seconds:.0f} s · {Limits()}")
    sections = [
        Section("What failed", [block for test in wrong for block in _failed(test)]),
        Section("What did not run", [_skipped(books.finished)]),
        Section(
            "Patterns, capture and streams",
            [PageTable(HEADERS, pattern_rows(run)), Verbatim(LEGEND)] if books.entries else [],
        ),
        Section(
            "Passes",
            [PageTable(PASS_HEADERS, pass_rows(run))] if books.entries else [],
            "In how many programs each pass of the pipeline did something, in order.",
        ),
        Section("Speed", [PageTable(RATE_HEADERS, rate_rows(run))]),
        _ulps(books.entries),
        _graphs(books.entries),
        _timeline(books.slowest),
        *(_model(model) for test in books.finished for model in test.models),
        Section("Slowest tests", [_slowest(run)]),
    ]
    return Page("Conformance", sections, verdict, good, facts).html()


def _failed(test: Finished) -> list[Verbatim | Drawing]:
    """The test with its whole text folded away, the smallest failing program as a drawing, and what is to blame."""
    whole = Verbatim(test.text, test.test)
    if test.failure is None:
        return [whole]
    failure = test.failure
    caption = (
        f"{failure.message}. Guilty: {failure.guilty}. Shrunk to {counted(failure.operators, 'operator')}; "
        f"{failure.script} reproduces it."
    )
    return [whole, Drawing(draw_program(failure.source), caption)]


def _reason(test: Finished) -> str:
    """Why a test was skipped, or is known to fail."""
    return test.text or "no reason is given" if test.outcome in {"skipped", "xfailed"} else ""


def _skipped(finished: Sequence[Finished]) -> PageTable:
    """Each reason, and the tests that did not run, or did not count, for it."""
    rows: dict[tuple[str, str], list[str]] = {}
    for test in finished:
        if reason := _reason(test):
            rows.setdefault((test.outcome, reason), []).append(test.test.rpartition("::")[2])
    return PageTable(
        ("outcome", "because", "tests", "which"),
        [(outcome, reason, len(tests), ", ".join(tests)) for (outcome, reason), tests in rows.items()],
    )


def _ulps(entries: list[Entry]) -> Section:
    """One histogram a pattern: the worst element of every example."""
    by_pattern: dict[str, list[float]] = {}
    for entry in entries:
        if entry.fusions and not entry.failures:
            by_pattern.setdefault(entry.what, []).append(entry.worst_ulp)
    blocks = [
        Drawing(draw_histogram(values), f"{name}: {counted(len(values), 'program')}")
        for name, values in by_pattern.items()
    ]
    return Section(
        "Distance from the float64 reference", blocks,
        "The worst element of every program in which something was fused, in ulps of its dtype. Bars are logarithmic.",
    )  # fmt: skip


def _graphs(entries: list[Entry]) -> Section:
    """For each pattern the smallest program in which it was fused, and one in which it was refused."""
    blocks = []
    for name in dict.fromkeys(entry.what for entry in entries if entry.route != "streams"):
        own = [entry for entry in entries if entry.what == name and not entry.failures]
        for chosen, what in (
            ([entry for entry in own if entry.fusions], "fused"),
            ([entry for entry in own if entry.near_miss and not entry.fusions], "left alone"),
        ):
            if chosen:
                entry = _typical(chosen)
                why = f", near-miss “{entry.near_miss}”" if entry.near_miss else ""
                why += f": {'; '.join(entry.reasons)}" if why and entry.reasons else ""
                blocks.append(Drawing(draw_program(entry.source), f"{name}, {what}{why}"))
    return Section("Graphs", blocks, "The planted pattern is marked. Rows are depths; dashed boxes are inputs.")


def _typical(entries: list[Entry]) -> Entry:
    """A program of middling length: the smallest show nothing of what is around a pattern."""
    return sorted(entries, key=lambda entry: len(entry.source))[len(entries) // 2]


def _timeline(slowest: Slowest | None) -> Section:
    title = "Timeline of the slowest program"
    if slowest is None:
        return Section(title, [])
    blocks = []
    for what, work in (("eager", slowest.eager), ("captured and replayed", slowest.replayed)):
        spans = [Span(**span) for span in work]
        end = max((span.start + span.duration for span in spans), default=0)
        blocks.append(Drawing(chart(spans), f"{what}: {end:.1f} µs, modelled"))
    return Section(
        title, [*blocks, Verbatim(slowest.source)],
        f"It took {slowest.seconds:.2f} s to check. Times below are a roofline model of the emulated chip, not measurements.",
    )  # fmt: skip


def _model(model: dict[str, object]) -> Section:
    blocks = [PageTable(model["headers"], model["rows"])]  # type: ignore[arg-type]
    blocks += [PageTable(part["headers"], part["rows"]) for part in model.get("parts", ())]  # type: ignore[attr-defined]
    return Section(f"Model: {model['name']}", blocks, str(model["note"]))


def _slowest(run: Run) -> PageTable:
    tests = sorted(run.books.finished, key=lambda test: -test.seconds)[:_SLOWEST]
    return PageTable(
        ("seconds", "outcome", "test"), [(f"{test.seconds:.1f}", test.outcome, test.test) for test in tests]
    )
