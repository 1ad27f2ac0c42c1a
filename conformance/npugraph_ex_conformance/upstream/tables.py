"""The end of a run in words and columns, and as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from npugraph_ex._plurals import counted
from npugraph_ex_conformance.upstream.outcome import UpstreamOutcome


def tally(outcomes: Iterable[UpstreamOutcome]) -> str:
    """``12 passed, 3 failed (1 known), 4 skipped``."""
    outcomes = list(outcomes)
    states = Counter(outcome.state for outcome in outcomes)
    known = sum(bool(outcome.known) for outcome in outcomes)
    failed = f"{states['failed']} failed" + (f" ({known} known)" if known else "")
    return f"{states['passed']} passed, {failed}, {states['skipped']} skipped"


def report(outcomes: Sequence[UpstreamOutcome], stale: Sequence[str]) -> Iterator[str]:
    """The lines of the table."""
    by_file: dict[str, list[UpstreamOutcome]] = {}
    for outcome in outcomes:
        by_file.setdefault(outcome.file, []).append(outcome)
    wrong = {file: of for file, of in by_file.items() if any(one.state == "failed" for one in of)}
    ran = {file for file, of in by_file.items() if any(one.state != "skipped" for one in of)}
    if wrong:
        width = max(map(len, wrong))
        yield "files with failures"
        yield from (f"  {file:<{width}}  {tally(of)}" for file, of in wrong.items())
        yield ""
    yield from _counted("failed by cause", (o.cause for o in outcomes if o.state == "failed" and not o.known))
    yield from _counted("failed, with a known reason", (o.known for o in outcomes if o.known))
    yield from _counted("skipped by reason", (o.cause for o in outcomes if o.state == "skipped"))
    if stale:
        yield "known differences that are gone; delete their lines"
        yield from (f"  {pattern}" for pattern in stale)
        yield ""
    tests = [outcome for outcome in outcomes if outcome.state != "skipped"]
    passed = sum(outcome.state == "passed" for outcome in tests)
    share = f", {100 * passed / len(tests):.1f} % of those that ran" if tests else ""
    yield f"tests: {tally(outcomes)}{share}"
    skipped = len(by_file) - len(ran)
    yield f"files: {len(ran - set(wrong))} of {counted(len(ran), 'file')} that ran passed whole; {skipped} skipped whole"


def _counted(title: str, causes: Iterable[str]) -> Iterator[str]:
    found = Counter(causes)
    if found:
        yield title
        yield from (
            f"  {count:>5}  {cause.splitlines()[0] if cause else '(nothing said)'}"
            for cause, count in found.most_common()
        )
        yield ""


def as_json(outcomes: Sequence[UpstreamOutcome], stale: Sequence[str], *, complete: bool) -> str:
    """One object: the outcomes as they are, the stale entries, and whether the run came to its end."""
    found = {"complete": complete, "stale": [*stale], "outcomes": [outcome._asdict() for outcome in outcomes]}
    return json.dumps(found, indent=1)
