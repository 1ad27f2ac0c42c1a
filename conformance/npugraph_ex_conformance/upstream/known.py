"""Differences that have an explanation: a pattern of tests, and one line that says why they fail; and entries that are stale."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from npugraph_ex.errors import UsageError
from npugraph_ex_conformance.upstream.outcome import UpstreamOutcome

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

OURS = Path(__file__).with_name("known_differences.toml")


def load(file: Path, project: str) -> Mapping[str, str]:
    """The entries for one project: pattern -> reason.

    Raises:
        UsageError: the file cannot be read, or an entry is not a line of text.
    """
    try:
        entries = tomllib.loads(file.read_text(encoding="utf-8")).get(project, {})
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"the known differences in {str(file)!r} cannot be read: {error}") from error
    for pattern, reason in entries.items():
        if not isinstance(reason, str) or not reason.strip() or "\n" in reason:
            raise UsageError(f"{file}: {pattern!r} must have a reason of one line; it has {reason!r}")
    return entries  # type: ignore[no-any-return]


def explained(outcomes: Sequence[UpstreamOutcome], entries: Mapping[str, str]) -> list[UpstreamOutcome]:
    """The outcomes, each failure with the reason of the first entry that it matches."""
    return [
        outcome._replace(known=next((entries[pattern] for pattern in entries if _is_of(pattern, outcome)), ""))
        if outcome.state == "failed"
        else outcome
        for outcome in outcomes
    ]


def stale(outcomes: Sequence[UpstreamOutcome], entries: Mapping[str, str]) -> Iterator[str]:
    """Entries whose files ran and in which nothing failed that they explain: they can be deleted."""
    ran = {outcome.file for outcome in outcomes}
    for pattern in entries:
        concerned = any(fnmatchcase(file, pattern.partition("::")[0]) for file in ran)
        if concerned and not any(outcome.state == "failed" and _is_of(pattern, outcome) for outcome in outcomes):
            yield pattern


def _is_of(pattern: str, outcome: UpstreamOutcome) -> bool:
    return fnmatchcase(outcome.name, pattern) or fnmatchcase(outcome.file, pattern)
