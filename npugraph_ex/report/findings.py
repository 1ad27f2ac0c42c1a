"""What the stream check says: findings as plain data, and the list of them as a table, JSON and SARIF 2.1.0.

Lowering adds what only it can see (a wait on an event that nothing records); `analysis` finds the rest. Nothing here
looks at a graph.
"""

from __future__ import annotations

import hashlib
import json
import linecache
import os
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import quote

from tabulate import tabulate

from npugraph_ex._version import __version__

FINDING_HEADERS = ("level", "finding", "first", "second", "repair")
Level = Literal["error", "warning", "note"]
"""Wrong results are possible; probably not what was meant; does nothing."""


class Code(str, Enum):
    """What is wrong, as a word that stays the same from version to version."""

    __str__ = str.__str__  # what `StrEnum` of Python 3.11 adds
    __format__ = str.__format__  # type: ignore[assignment]  # the names of its arguments differ

    READ_AFTER_WRITE = "read-after-write"
    WRITE_AFTER_READ = "write-after-read"
    WRITE_AFTER_WRITE = "write-after-write"
    MEMORY_REUSED = "memory-reused"
    OUTPUT_UNORDERED = "output-unordered"
    WRITE_BACK_UNORDERED = "write-back-unordered"
    NEVER_FORKED = "never-forked"
    NEVER_JOINED = "never-joined"
    WAIT_WITHOUT_RECORD = "wait-without-record"
    WAIT_FOR_OUTSIDE = "wait-for-outside"
    RECORDED_TWICE = "recorded-twice"
    WAIT_ORDERS_NOTHING = "wait-orders-nothing"
    MADE_DEPENDENT = "made-dependent"
    COLLECTIVES_EXCEED_CORES = "collectives-exceed-cores"


class Meaning(NamedTuple):
    """How bad a finding is, what it means in general, and what mends it; a finding itself has the very line."""

    level: Level
    what: str
    remedy: str


MEANING: dict[Code, Meaning] = {
    Code.READ_AFTER_WRITE: Meaning(
        "error",
        "A read may run before the write whose value it needs.",
        "Let the stream that reads wait for an event that the other stream records after its write.",
    ),
    Code.WRITE_AFTER_READ: Meaning(
        "error",
        "A write may run before an earlier read of the same bytes.",
        "Let the stream that writes wait for an event that the other stream records after its read, or write into a new tensor.",
    ),
    Code.WRITE_AFTER_WRITE: Meaning(
        "error",
        "Two writes to the same bytes may run in either order.",
        "Let the second stream wait for an event that the first stream records after its write, or write into two tensors.",
    ),
    Code.MEMORY_REUSED: Meaning(
        "error",
        "Memory may be reused on its own stream while another stream still uses it.",
        "After the last use on the other stream call `tensor.record_stream(stream)`, or `ops.npu_record_tagged_stream`.",
    ),
    Code.OUTPUT_UNORDERED: Meaning(
        "error",
        "The caller may read an output before it is computed.",
        "Before the graph ends, let the main stream wait for an event that the stream of the output records after computing it.",
    ),
    Code.WRITE_BACK_UNORDERED: Meaning(
        "error",
        "The caller may see an input before the graph has written it.",
        "Before the graph ends, let the main stream wait for an event that the other stream records after its write.",
    ),
    Code.NEVER_FORKED: Meaning(
        "error",
        "A stream's work may run before the graph has begun; it would not be captured.",
        "Before its first work, let the stream wait for an event that the main stream records in the graph.",
    ),
    Code.NEVER_JOINED: Meaning(
        "error",
        "A stream's work may still run when the graph has ended; it cannot be captured.",
        "Before the graph ends, let the main stream wait for an event that the stream records after its last work.",
    ),
    Code.WAIT_WITHOUT_RECORD: Meaning(
        "error",
        "A wait waits for an event that was not recorded before it.",
        "Move the record to before the wait, or the wait to after it; without any record, add one or remove the wait.",
    ),
    Code.WAIT_FOR_OUTSIDE: Meaning(
        "note",
        "A wait waits for an event that its graph has not recorded: it is over by then, or was never recorded.",
        "If the record was forgotten, add it on the stream to wait for, before the wait; otherwise nothing is to be done.",
    ),
    Code.RECORDED_TWICE: Meaning(
        "warning",
        "An event is recorded again before anything waited for it.",
        "Wait for the first record before the second one, or remove the first, or take a second event.",
    ),
    Code.COLLECTIVES_EXCEED_CORES: Meaning(
        "warning",
        "Collectives that may run at once need more cores than there are, so that processes may wait for each other.",
        "Put each under `npugraph_ex.scope.limit_core_num`, with limits that fit together, or let an event order them.",
    ),
    Code.WAIT_ORDERS_NOTHING: Meaning(
        "note",
        "A wait orders nothing that is not ordered without it.",
        "Remove the wait, or move it to where it should order something.",
    ),
    Code.MADE_DEPENDENT: Meaning(
        "note",
        "Functional forms of writes in place depend on each other, as the program does not; the compiler orders them.",
        "Nothing is to be done: the results are right. To let the writes run at once, give each stream a tensor of its own.",
    ),
}
"""`npugraph-ex help CODE` and SARIF's rules say it; the page of the stream check has the same sentences."""


def stream_name(label: str | None) -> str:
    """A stream as messages call it."""
    return "the main stream" if not label else f"stream {label!r}"


@dataclass(frozen=True)
class Location:
    """One side of a finding.

    Attributes:
        node: its name in the graph.
        stream: the label of the stream it stands on; None for the stream on which the graph is called.
        does: the operator and what it does to the memory, as in "`aten.mul_.Tensor` writes 64 bytes of x".
        source: ``file:line`` of the user's code; empty where the graph does not know.
    """

    node: str
    stream: str | None
    does: str = ""
    source: str = ""

    def __str__(self) -> str:
        what = f"{self.node} ({self.does})" if self.does else self.node
        return f"{what} on {stream_name(self.stream)}{f' at {self.source}' if self.source else ''}"


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with the streams of a graph, and the line that mends it.

    Attributes:
        code: what kind of thing.
        message: one sentence.
        first: the node that comes first in the graph.
        second: the other; None where the graph has only one.
        missing_edge: "A before B", in words; where no order is missing, "none" and why.
        repair: the line to add or remove, in the words of the API that the program uses.
        record_after: the node after which a record is missing; empty where there is one already.
        record: the record that is there already.
        wait_before: the node before which a wait is missing.
        keep_alive: the value whose memory must not be reused while ``first`` runs.
        repaired: whether the graph that runs has the edge, because the option asked for repair.
    """

    code: Code
    message: str
    first: Location
    second: Location | None = None
    missing_edge: str = ""
    repair: str = ""
    record_after: str = ""
    record: str = ""
    wait_before: str = ""
    keep_alive: str = ""
    repaired: bool = False

    @property
    def level(self) -> Level:
        """How bad it is."""
        return MEANING[self.code].level

    @property
    def shown_level(self) -> str:
        """The level, and whether it is repaired."""
        return f"{self.level} (repaired)" if self.repaired else self.level

    def __str__(self) -> str:
        lines = [f"{self.level} [{self.code.value}]{' (repaired)' if self.repaired else ''}: {self.message}"]
        lines += [f"  {side}" for side in (self.first, self.second) if side is not None]
        if self.missing_edge:
            lines.append(f"  missing: {self.missing_edge}")
        if self.repair:
            lines.append(f"  repair: {self.repair}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Findings:
    """What is wrong with the streams of one graph, in the order of the graph."""

    found: tuple[Finding, ...] = ()

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.found)

    def __len__(self) -> int:
        return len(self.found)

    def __add__(self, others: Findings) -> Findings:
        return Findings((*self.found, *others.found))

    def of(self, *codes: Code) -> tuple[Finding, ...]:
        """Those with one of ``codes``."""
        return tuple(finding for finding in self.found if finding.code in codes)

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings that can make results wrong. Their level is "error", and they are not repaired."""
        return tuple(finding for finding in self.found if finding.level == "error" and not finding.repaired)

    def as_repaired(self, *codes: Code) -> Findings:
        """The same; those with one of ``codes``, or all, marked as repaired."""
        return Findings(
            tuple(replace(found, repaired=True) if not codes or found.code in codes else found for found in self.found)
        )

    def after_repair(self, left: Findings) -> Findings:
        """The same, where those are marked as repaired that are not among what is ``left`` in the repaired graph.

        What is left keeps the words of before: they are about the program, which nobody repaired.
        """
        had, still = (set(map(_finding_key, one)) for one in (self, left))
        told = (found if _finding_key(found) in still else replace(found, repaired=True) for found in self.found)
        return Findings((*told, *(found for found in left if _finding_key(found) not in had)))

    def __str__(self) -> str:
        return "\n".join(str(finding) for finding in self.found) or "Streams: nothing was found."

    def rows(self) -> list[tuple[str, ...]]:
        """One row a finding, below `FINDING_HEADERS`."""
        return [
            (
                finding.shown_level,
                finding.code.value,
                *(f"{side.node}, {stream_name(side.stream)}" if side else "" for side in (finding.first, finding.second)),
                finding.repair,
            )
            for finding in self.found
        ]  # fmt: skip

    def table(self) -> str:
        """The rows as text; empty when there is none."""
        rows = self.rows()
        return tabulate(rows, headers=FINDING_HEADERS, tablefmt="simple", disable_numparse=True) if rows else ""

    def _repr_html_(self) -> str:
        """The table, below a cell of a Jupyter notebook."""
        return str(tabulate(self.rows(), headers=FINDING_HEADERS, tablefmt="html")) if self.found else str(self)

    def to_json(self) -> str:
        """A JSON list, one object a finding, its level included."""
        return json.dumps([{"level": finding.level, **asdict(finding)} for finding in self.found], indent=2)

    def to_sarif(self) -> str:
        """A SARIF 2.1.0 log, which code hosts and editors show beside the source lines.

        What several compilations of one function find is one result. It is repaired if it is so in all of them. A file below the
        root of the repository, or below the working directory where there is none, is relative to it; another one is absolute.
        """
        root = _source_root()
        alike: dict[object, Finding] = {}
        for finding in sorted(self.found, key=lambda finding: finding.repaired):
            alike.setdefault(_place_key(finding), finding)
        found = [alike[key] for key in dict.fromkeys(map(_place_key, self.found))]
        codes = list(dict.fromkeys(finding.code for finding in found))
        driver = {"name": "npugraph_ex stream check", "version": __version__, "rules": [_rule(code) for code in codes]}
        run = {
            "tool": {"driver": driver},
            "originalUriBaseIds": {_SOURCE_ROOT: {"uri": f"{root.as_uri().rstrip('/')}/"}},
            "results": [_result(*one, codes, root) for one in zip(found, _fingerprints(found), strict=True)],
        }
        log = {"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}
        return json.dumps(log, indent=2)


def _finding_key(finding: Finding) -> object:
    """Equal for what is found twice between the same nodes of one graph."""
    return finding.code, *((side.node, side.source) for side in (finding.first, finding.second) if side is not None)


def _place_key(finding: Finding) -> object:
    """Equal for what compilations of one function find in the same lines, where they number their nodes in their own ways."""
    sides = (side for side in (finding.first, finding.second) if side is not None)
    return finding.code, *(
        (re.sub(r"(_\d+)+$", "", side.node) if side.source else side.node, side.source) for side in sides
    )


_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"


def _rule(code: Code) -> dict[str, Any]:
    level, meaning, remedy = MEANING[code]
    return {
        "id": code.value,
        "shortDescription": {"text": meaning},
        "help": {"text": f"{meaning} {remedy}", "markdown": f"{meaning}\n\n{remedy}"},
        "defaultConfiguration": {"level": level},
    }


def _result(finding: Finding, fingerprint: str, codes: list[Code], root: Path) -> dict[str, Any]:
    """One SARIF result: at the second node, where a wait would stand, with the first beside it."""
    sides = _sides(finding)
    does = "Repaired in the graph that runs. In the program" if finding.repaired else "Repair"
    text = f"{finding.message}. {does}: {finding.repair}" if finding.repair else finding.message
    result: dict[str, Any] = {
        "ruleId": finding.code.value,
        "ruleIndex": codes.index(finding.code),
        "level": "note" if finding.repaired else finding.level,
        "message": _message(text, root),
        "locations": [_location(sides[0], root)],
        "partialFingerprints": {_FINGERPRINT: fingerprint},
        "properties": asdict(finding),
    }
    if len(sides) > 1:
        result["relatedLocations"] = [{"id": 1, **_location(sides[1], root), "message": _message(str(sides[1]), root)}]
    return result


def _message(text: str, root: Path) -> dict[str, str]:
    """A text whose files are relative to the root, as those of the locations are."""
    return {"text": text.replace(f"{root}{os.sep}", "")}


_FINGERPRINT = "primaryLocationLineHash"
"""The name that code hosts look for, to know a finding again that somebody has dismissed."""


def _fingerprints(found: Sequence[Finding]) -> Iterator[str]:
    """What stays of each finding when lines move: its code and the text of its lines; its number where a file has equal ones."""
    seen = Counter[tuple[str, str]]()
    for finding in found:
        places = [place for place in map(_file_and_line, _sides(finding)) if place[1]]
        lines = [linecache.getline(file, int(line)).strip() for file, line in places]
        text = hashlib.sha256("\n".join([finding.code.value, *lines]).encode()).hexdigest()[:16]
        there = (text, places[0][0] if places else "")
        seen[there] += 1
        yield f"{text}:{seen[there]}"


def _sides(finding: Finding) -> list[Location]:
    """The second node, where a wait would stand, before the first."""
    return [side for side in (finding.second, finding.first) if side is not None]


def _file_and_line(side: Location) -> tuple[str, str]:
    """The file and the line of a source; both empty where none is known."""
    file, _, line = side.source.rpartition(":")
    return (file, line) if file and line.isdigit() else ("", "")


_warned: dict[object, object] = {}
"""The registry of `warnings`: which warnings were shown already."""


def warn_at(finding: Finding, text: str, category: type[Warning]) -> None:
    """Warn at the user's line that a finding is about, its second place first: there an event belongs."""
    places = map(_file_and_line, _sides(finding))
    file, line = next(((file, line) for file, line in places if file), ("", "0"))
    if file:
        warnings.warn_explicit(text, category, file, int(line), registry=_warned)  # type: ignore[arg-type]
    else:
        warnings.warn(text, category, stacklevel=3)


_SOURCE_ROOT = "%SRCROOT%"
"""The name that code hosts give to the root of a repository."""


def _source_root() -> Path:
    """The root of the repository around the working directory; that directory where there is none."""
    here = Path.cwd()
    return next((folder for folder in (here, *here.parents) if (folder / ".git").exists()), here)


def _location(side: Location, root: Path) -> dict[str, Any]:
    """Where a node came from: its source line where that is known, and its name in any case."""
    location: dict[str, Any] = {"logicalLocations": [{"name": side.node, "kind": "function"}]}
    file, line = _file_and_line(side)
    if file:
        path = Path(os.path.normpath(Path.cwd() / file))
        place = (
            {"uri": quote(path.relative_to(root).as_posix()), "uriBaseId": _SOURCE_ROOT}
            if path.is_relative_to(root)
            else {"uri": path.as_uri()}
        )
        location["physicalLocation"] = {"artifactLocation": place, "region": {"startLine": int(line)}}
    return location
