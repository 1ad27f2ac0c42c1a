"""The end of a run in words and columns, and as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from npugraph_ex._plurals import counted
from npugraph_ex_conformance.upstream.known import KINDS
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
    failed = [outcome for outcome in outcomes if outcome.state == "failed" and not outcome.known]
    if failed:
        yield "tests that failed"
        for outcome in failed:
            yield from (f"  {outcome.name}", f"    {outcome.said}")
        yield ""
    yield from _counted("failed by cause", (outcome.cause for outcome in failed))
    for kind, words in KINDS.items():
        yield from _counted(f"failed: {words} ({kind})", (_reason(o) for o in outcomes if o.kind == kind))
    yield from _counted("skipped by reason", (o.cause for o in outcomes if o.state == "skipped"))
    yield from _gone(stale)
    tests = [outcome for outcome in outcomes if outcome.state != "skipped"]
    passed = sum(outcome.state == "passed" for outcome in tests)
    share = f", {100 * passed / len(tests):.1f} % of those that ran" if tests else ""
    yield f"tests: {tally(outcomes)}{share}"
    skipped = len(by_file) - len(ran)
    whole = len(ran - set(wrong))
    yield f"files: {whole} of {counted(len(ran), 'file')} that ran passed whole; {skipped} skipped whole"
    yield from _covered(wrong, len(ran), whole)


def of_documents(outcomes: Sequence[UpstreamOutcome], stale: Sequence[str]) -> Iterator[str]:
    """A line for each value that a formula refuses, why values were not given to one, and how many there are of each."""
    refused = [outcome for outcome in outcomes if outcome.state == "failed"]
    if refused:
        yield "operator, argument and value that a formula does not take"
        names = max(len(outcome.name) for outcome in refused)
        for outcome in refused:
            yield f"  {outcome.name:<{names}}  {f'known ({outcome.kind}): {outcome.known}' if outcome.known else outcome.message}"
        yield ""
    yield from _counted("not given to a formula", (o.cause for o in outcomes if o.state == "skipped"))
    yield from _gone(stale)
    asked = [outcome for outcome in outcomes if outcome.state != "skipped"]
    documents, given = (counted(len({outcome.file for outcome in of}), "operator") for of in (outcomes, asked))
    known = sum(bool(outcome.known) for outcome in refused)
    yield f"values: {counted(len(outcomes), 'value')} in the documents of {documents}"
    yield f"given to a formula: {len(asked)} of {given}; {len(refused)} refused ({known} known)"


def _gone(stale: Sequence[str]) -> Iterator[str]:
    if stale:
        yield "known differences that are gone; delete their lines"
        yield from (f"  {pattern}" for pattern in stale)
        yield ""


def _reason(outcome: UpstreamOutcome) -> str:
    """Why a failure is known; where the test is to blame, at which line of which file it stops."""
    at = f"{outcome.file.rpartition('/')[2]}:{outcome.line}: " if outcome.kind == "mistake" and outcome.line else ""
    return at + outcome.known


def _covered(wrong: Mapping[str, Sequence[UpstreamOutcome]], ran: int, whole: int) -> Iterator[str]:
    """The share of the files whose operators this torch_npu and the emulated device have; and what stops the others of them."""
    reasons = {file: {o.uncovered for o in of if o.uncovered} for file, of in wrong.items()}
    left_out = Counter(
        next(name for name in ("no kernel", "absent", "devices") if name in of) for of in reasons.values() if of
    )
    covered = ran - left_out.total()
    if not left_out or not covered:
        return
    share = 100 * whole / covered
    yield f"files of covered operators: {whole} of {covered} passed whole, {share:.1f} %"
    yield (
        f"  not among them: {left_out['no kernel']} that call an operator without a kernel, {left_out['absent']} that call what "
        f"the installed torch_npu does not have, {left_out['devices']} that need several devices"
    )
    blamed = sum(not reasons[file] and any(o.kind == "mistake" for o in of) for file, of in wrong.items())
    yield f"  among them: {blamed} with a mistake of the test's own"


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
