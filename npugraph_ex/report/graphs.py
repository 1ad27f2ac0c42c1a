"""The records of compiled graphs: inputs by class, the passes' work, obstacles to a capture.

A record is made once, when the graph is compiled; replays never touch it. Captures, which come later, name the graph
by its number: see `captures.py`.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from npugraph_ex.report.findings import Finding
from npugraph_ex.report.passes import PassReport

InputClass = Literal["in place", "copied", "key", "updated", "as given"]
Fate = Literal["captured", "force_eager", "dumped", "not capturable", "nothing to run"]

_KEPT = 1000


@dataclass(frozen=True)
class InputRecord:
    """One input of a compiled graph.

    Attributes:
        name: the user's name, if Dynamo knows it.
        kind: "in place" (read and written at the caller's address), "copied" into the graph's own buffer before each
            replay, "key" (a number that a capture fixes), "updated" (replays update it in captured kernels), "as given" if
            nothing is captured.
        mutated: the graph writes it.
        value: dtype, shape and device of a tensor; the value or the symbol of a number.
        weight_bytes: of a parameter or buffer whose address is fixed, its bytes; 0 for all other inputs.
    """

    name: str
    kind: InputClass
    mutated: bool
    value: str
    weight_bytes: int = 0


@dataclass(frozen=True)
class CallRecord:
    """A call of a graph.

    Attributes:
        name: in the graph; a node that the passes leave alone keeps it.
        operator: what it calls.
        stream: its stream's label; empty for the main stream.
        source: ``file:line`` of the user's code; empty where the graph does not know.
        kernel: whether it starts work on the device.
        alive_bytes: of the results that the graph has made and still needs while the call runs, for the traced sizes.
        moved_bytes: what a kernel reads and writes, for the traced sizes; 0 for a call that is no kernel.
        kernels: how many it starts: several for an operator that the device takes apart.
    """

    name: str
    operator: str
    stream: str
    source: str
    kernel: bool
    alive_bytes: int = 0
    moved_bytes: int = 0
    kernels: int = 0


@dataclass(frozen=True)
class GraphRecord:
    """One compiled graph.

    Attributes:
        number: counts the compiled graphs of this process from 1.
        fate: how a call of the graph runs, and the reason if it does not replay a capture.
        inputs: in the order of the graph's placeholders.
        report: what passes and fusion rules did.
        kernels_before: the number of kernels in AOT's graph.
        kernels_after: the number after all passes.
        obstacles: operations that keep the graph from being captured, each with its source line.
        options: those that are not at their default, by name, as text.
        before: the calls of AOT's graph, in order.
        after: the calls after all passes.
        peak_before: the largest `alive_bytes` of AOT's graph; a model of memory, without what an allocator rounds up.
        peak_after: the same after all passes.
        cause: why it was compiled: for a first call, or again because of what had changed since an earlier compilation.
        trained: whether it is the forward half of a graph that is trained. The backward half runs operator by operator.
        place: ``file:line`` in the function that was compiled, of its first call; empty where the graph does not know.
    """

    number: int
    fate: Fate
    inputs: tuple[InputRecord, ...]
    report: PassReport
    kernels_before: int
    kernels_after: int
    obstacles: tuple[str, ...] = ()
    options: tuple[tuple[str, str], ...] = ()
    before: tuple[CallRecord, ...] = ()
    after: tuple[CallRecord, ...] = ()
    peak_before: int = 0
    peak_after: int = 0
    cause: str = "for the first call"
    trained: bool = False
    place: str = ""


_records: deque[GraphRecord] = deque(maxlen=_KEPT)
_refused: list[Finding] = []
_loaded = 0
_numbers = itertools.count(1)


def next_number() -> int:
    """The number of the next compiled graph."""
    return next(_numbers)


def publish(record: GraphRecord) -> None:
    """Add a graph to the record."""
    _records.append(record)


def refused(number: int, why: str) -> None:
    """Note that the device refused to capture a graph, which then runs operator by operator."""
    for position, record in enumerate(_records):
        if record.number == number:
            _records[position] = replace(record, fate="not capturable", obstacles=(*record.obstacles, why))


def graphs_so_far() -> int:
    """The number of the latest compiled graph: a mark for ``graph_records(after=...)``."""
    return _records[-1].number if _records else 0


def note_refused(findings: Iterable[Finding]) -> None:
    """Keep what the stream check found in a graph that it refused, which has no record."""
    _refused.extend(findings)


def note_loaded() -> None:
    """Count a graph that was not compiled in this process, but loaded."""
    global _loaded  # noqa: PLW0603 - a number of the process
    _loaded += 1


def loaded_so_far() -> int:
    """How many graphs were loaded."""
    return _loaded


def refused_so_far() -> int:
    """How many findings there are of refused graphs: a mark for ``refused_findings(after=...)``."""
    return len(_refused)


def refused_findings(*, after: int = 0) -> tuple[Finding, ...]:
    """The findings of refused graphs, oldest first."""
    return tuple(_refused[after:])


def graph_records(*, after: int = 0) -> tuple[GraphRecord, ...]:
    """The graphs numbered above ``after``, oldest first, of which the latest 1000 are kept."""
    return tuple(record for record in _records if record.number > after)
