"""Differences that have an explanation: a pattern of tests, of which kind they are, and one line that says why; stale entries."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from npugraph_ex.errors import UsageError
from npugraph_ex_conformance.upstream.outcome import UpstreamOutcome

OURS = Path(__file__).with_name("known_differences.toml")


KINDS: Mapping[str, str] = MappingProxyType(
    {
        "gap": "the emulated device does not cover it",
        "mistake": "the test's own mistake",
        "absent": "the installed torch_npu does not have it",
        "devices": "needs several devices",
        "limit": "needs more time or memory than the run allows",
        "cpu": "the CPU's torch or NumPy refuses it, or computes it in another way",
        "hardware": "needs CANN or a real device",
        "example": "no example of the record shows it: it needs several arguments at once",
    }
)
"""What a failure can be instead of a fault: each is a table of the file, below the project's."""


class KnownDifference(NamedTuple):
    """Why tests fail.

    Attributes:
        kind: one of `KINDS`.
        reason: one line.
    """

    kind: str
    reason: str


def load(file: Path, project: str) -> Mapping[str, KnownDifference]:
    """The entries for one project: pattern -> difference.

    Raises:
        UsageError: the file cannot be read, or an entry is of no kind or not a line of text.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib  # the extra `conformance` brings it; other commands work without
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8")).get(project, {})
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"the known differences in {str(file)!r} cannot be read: {error}") from error
    entries: dict[str, KnownDifference] = {}
    for kind, table in tables.items():
        if kind not in KINDS or not isinstance(table, dict):
            raise UsageError(f"{file}: {project}.{kind} must be a table named by one of {', '.join(KINDS)}")
        for pattern, reason in table.items():
            if not isinstance(reason, str) or not reason.strip() or "\n" in reason:
                raise UsageError(f"{file}: {pattern!r} must have a reason of one line; it has {reason!r}")
            entries[pattern] = KnownDifference(kind, reason)
    return entries


def explained(outcomes: Sequence[UpstreamOutcome], entries: Mapping[str, KnownDifference]) -> list[UpstreamOutcome]:
    """The outcomes, each failure with the kind and the reason of the first entry that it matches."""
    nothing = KnownDifference("", "")
    found = []
    for outcome in outcomes:
        of = (entry for pattern, entry in entries.items() if _is_of(pattern, outcome))
        kind, reason = next(of, nothing) if outcome.state == "failed" else nothing
        found.append(outcome._replace(kind=kind, known=reason))
    return found


def stale(outcomes: Sequence[UpstreamOutcome], entries: Mapping[str, KnownDifference]) -> Iterator[str]:
    """Entries whose files ran and in which nothing failed that they explain: they can be deleted.

    What a run's limits stop is not among them: another run has others.
    """
    ran = {outcome.file for outcome in outcomes}
    for pattern in (pattern for pattern, entry in entries.items() if entry.kind != "limit"):
        concerned = any(fnmatchcase(file, pattern.partition("::")[0]) for file in ran)
        if concerned and not any(outcome.state == "failed" and _is_of(pattern, outcome) for outcome in outcomes):
            yield pattern


def _is_of(pattern: str, outcome: UpstreamOutcome) -> bool:
    return fnmatchcase(outcome.name, pattern) or fnmatchcase(outcome.file, pattern)
