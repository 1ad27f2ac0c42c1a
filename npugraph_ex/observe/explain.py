"""`Explanation`: what became of a program under this backend, as one frozen value that prints as tables or as JSON.

It joins what is recorded elsewhere (graphs, pass reports, captures) and measures nothing but the memory pools, which
its maker hands in.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from tabulate import tabulate

from npugraph_ex.report.captures import CaptureRecord, capture_records
from npugraph_ex.report.findings import Findings
from npugraph_ex.report.graphs import GraphRecord, graph_records


@dataclass(frozen=True)
class GraphExplanation:
    """One compiled graph.

    Attributes:
        graph: what was recorded when it was compiled.
        captures: what was captured for it since, each with its reason.
        pool_bytes: what its memory pool holds on the device; None once the graph is gone, or where nothing is captured.
    """

    graph: GraphRecord
    captures: tuple[CaptureRecord, ...]
    pool_bytes: int | None

    def text(self) -> str:
        """The graph as a heading and tables."""
        graph = self.graph
        saved = graph.kernels_before - graph.kernels_after
        facts = [
            ("runs as", _FATES[graph.fate]),
            ("kernels", f"{graph.kernels_before} before the passes, {graph.kernels_after} after, {saved} saved"),
            ("captures", len(self.captures)),
            ("pool", "none" if self.pool_bytes is None else f"{self.pool_bytes:,} bytes"),
            *((name, value) for name, value in graph.options),
            *(("not capturable", obstacle) for obstacle in graph.obstacles),
        ]
        inputs = [(entry.name, entry.kind, "yes" if entry.mutated else "", entry.value) for entry in graph.inputs]
        captures = [(record.number, record.reason, _numbers(record)) for record in self.captures]
        sections = [
            f"graph {graph.number}",
            tabulate(facts, tablefmt="plain", disable_numparse=True),
            _table(inputs, ("input", "class", "mutated", "value")),
            graph.report.table(),
            _table(captures, ("capture", "because of", "sizes and scalars")),
        ]
        return "\n\n".join(section for section in sections if section)


_FATES = {
    "captured": "captured graphs, replayed",
    "force_eager": "operator by operator, because of force_eager",
    "dumped": "operator by operator, because of dump_tensor_data",
    "not capturable": "operator by operator, because it cannot be captured",
    "nothing to run": "it has nothing to run on the device",
}


@dataclass(frozen=True)
class Explanation:
    """All graphs that a program compiled, oldest first; prints as text.

    Attributes:
        graphs: one entry for each compiled graph.
        breaks: why Dynamo split the program into several graphs, in its own words.
    """

    graphs: tuple[GraphExplanation, ...]
    breaks: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = [entry.text() for entry in self.graphs] or ["Nothing was compiled by this backend."]
        if self.breaks:
            parts.append("\n".join(["graph breaks:", *(f"  {reason}" for reason in self.breaks)]))
        return "\n\n".join(parts)

    @property
    def streams(self) -> Findings:
        """What the stream check found in all graphs."""
        return Findings(tuple(finding for entry in self.graphs for finding in entry.graph.report.streams))

    def to_json(self) -> str:
        """All of it as JSON, one key a field."""
        return json.dumps(asdict(self), indent=2, default=str)


def collect(
    *, graphs_after: int, captures_after: int, pools: Mapping[int, int], breaks: tuple[str, ...] = ()
) -> Explanation:
    """Join what was recorded since two marks.

    Args:
        graphs_after: `graphs_so_far()` at the start.
        captures_after: `captures_so_far()` at the start.
        pools: bytes of the memory pool by graph number, for the graphs that are still alive.
        breaks: why the program is more than one graph.
    """
    return Explanation(
        tuple(
            GraphExplanation(
                record, capture_records(after=captures_after, graph=record.number), pools.get(record.number)
            )
            for record in graph_records(after=graphs_after)
        ),
        breaks,
    )


def _table(rows: Sequence[tuple[object, ...]], headers: tuple[str, ...]) -> str:
    return tabulate(rows, headers=headers, tablefmt="simple", disable_numparse=True) if rows else ""


def _numbers(record: CaptureRecord) -> str:
    return ", ".join(str(number) for number in record.numbers)
