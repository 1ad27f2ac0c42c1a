"""`Explanation`: what became of a program under this backend, as one frozen value: tables, a page, or JSON.

It joins what is recorded elsewhere (graphs, pass reports, captures) and measures nothing but the memory pools, which
its maker hands in.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from difflib import SequenceMatcher
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING

from typing_extensions import deprecated

from npu_emulator.pages import Facts, Page, PageTable, Section, Verbatim
from npugraph_ex._plurals import counted
from npugraph_ex.observe import NOTHING_COMPILED
from npugraph_ex.observe.summary import BACKWARD, FATES, summary
from npugraph_ex.report.captures import CaptureRecord, capture_records
from npugraph_ex.report.findings import Finding, Findings
from npugraph_ex.report.graphs import CallRecord, GraphRecord, InputRecord, graph_records
from npugraph_ex.report.names import shown_name

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult


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

    def facts(self) -> list[tuple[str, object]]:
        """How the graph runs, and why."""
        graph = self.graph
        saved = graph.kernels_before - graph.kernels_after
        return [
            ("compiled", graph.cause),
            ("runs as", FATES[graph.fate]),
            *([("backward", BACKWARD)] if graph.trained else []),
            ("kernels", f"{graph.kernels_before} before the passes, {graph.kernels_after} after, {saved} saved"),
            ("captures", len(self.captures)),
            ("pool", "none" if self.pool_bytes is None else f"{self.pool_bytes:,} bytes"),
            ("peak of results", f"{graph.peak_before:,} bytes before the passes, {graph.peak_after:,} after, modelled"),
            *graph.options,
            *(("not capturable", obstacle) for obstacle in graph.obstacles),
        ]

    def section(self, *, every_weight: bool = True) -> Section:
        """The graph as a heading, tables and notes.

        Args:
            every_weight: one row for each parameter and buffer; if not, one for all that the graph reads alike.
        """
        graph = self.graph
        inputs = [
            (entry.name, entry.kind, "yes" if entry.mutated else "", entry.value)
            for entry in graph.inputs
            if every_weight or not _folds(entry)
        ]
        for kind in () if every_weight else dict.fromkeys(entry.kind for entry in graph.inputs if _folds(entry)):
            weights = [entry.weight_bytes for entry in graph.inputs if _folds(entry) and entry.kind == kind]
            inputs.append((counted(len(weights), "weight"), kind, "", f"{sum(weights):,} bytes"))
        captures = [(record.number, record.reason, ", ".join(map(str, record.numbers))) for record in self.captures]
        tables = [
            PageTable(("input", "class", "mutated", "value"), inputs),
            *(PageTable(*table) for table in graph.report.tables()),
            *map(Verbatim, graph.report.notes()),
            PageTable(("capture", "because of", "sizes and scalars"), captures),
        ]
        return Section(f"graph {graph.number}", [Facts(self.facts()), *filter(bool, tables)])

    @deprecated("GraphExplanation.text() goes in 0.3; use str(graph.section()).")
    def text(self) -> str:
        """The section as text. Deprecated: it goes in 0.3; use ``str(graph.section())``."""
        return str(self.section())

    def side_by_side(self) -> Section:
        """The calls before and after the passes, one row each, with what became of them and the user's line."""
        return self._compared(PageTable(_SIDES, self._rows()))

    def changes(self) -> Section:
        """Side by side in short: long runs of calls that the passes left alone are one row, and memory is left out."""
        rows: list[tuple[str, ...]] = []
        for happened, group in groupby(self._rows(), key=itemgetter(_HAPPENED)):
            run = list(group)
            short = not happened and len(run) > _LONG_RUN
            rows += [("…", f"{len(run)} calls", "the same", "", "", "", "")] if short else run
        streams = any(row[_STREAM] for row in rows)
        kept = [place for place in range(len(_SIDES)) if place != _ALIVE and (streams or place != _STREAM)]
        return self._compared(
            PageTable([_SIDES[place] for place in kept], [[row[place] for place in kept] for row in rows])
        )

    def _compared(self, table: PageTable) -> Section:
        return Section(
            f"graph {self.graph.number}: before and after the passes",
            [table],
            "The calls in order. A node that the passes kept is one row, what they removed or made has one side only.",
        )

    def _rows(self) -> list[tuple[str, ...]]:
        graph = self.graph
        told: dict[str, list[str]] = {}
        for record in graph.report.rules:
            for fusion in record.fusions:
                for name in fusion.replaced:
                    told.setdefault(name, []).append(f"fused by {shown_name(fusion.rule)}")
                for name in fusion.by:
                    told.setdefault(name, []).append(f"made by {shown_name(fusion.rule)}")
        for miss in graph.report.near_misses():
            told.setdefault(miss.node, []).append(f"near-miss of {shown_name(miss.rule)}: {miss.reason}")
        for miss in graph.report.unfused:
            told.setdefault(miss.node, []).append(miss.reason)
        for finding in graph.report.streams:
            for side in filter(None, (finding.first, finding.second)):
                told.setdefault(side.node, []).append(f"{finding.level}: {finding.code.value}")
        return [_row(before, after, told) for before, after in _aligned(graph.before, graph.after)]


def _folds(entry: InputRecord) -> bool:
    """Whether an input is a parameter or buffer of which short text gives the bytes alone."""
    return bool(entry.weight_bytes) and not entry.mutated


def _aligned(
    before: Sequence[CallRecord], after: Sequence[CallRecord]
) -> Iterator[tuple[CallRecord | None, CallRecord | None]]:
    """Pairs of calls in order: a node that stayed, by its name, with itself, another one alone."""
    old, new = ([node.name for node in side] for side in (before, after))
    for kind, first, last, begin, end in SequenceMatcher(a=old, b=new, autojunk=False).get_opcodes():
        if kind == "equal":
            yield from zip(before[first:last], after[begin:end], strict=True)
        else:
            yield from ((node, None) for node in before[first:last])
            yield from ((None, node) for node in after[begin:end])


def _row(before: CallRecord | None, after: CallRecord | None, told: Mapping[str, list[str]]) -> tuple[str, ...]:
    node = after or before
    if node is None:
        raise AssertionError("a row has a call on one side at least")
    usual = (
        ("" if before.operator == after.operator else "changed") if before and after else "new" if after else "removed"
    )
    happened = "; ".join(dict.fromkeys(told.get(node.name, [usual])))
    old, new = (side.operator.removesuffix(".default") if side else "" for side in (before, after))
    return node.name, old, new, node.stream, f"{node.alive_bytes:,}", happened, node.source


_SIDES = ("node", "before", "after", "stream", "alive, bytes", "what happened", "line")
_STREAM, _ALIVE, _HAPPENED = 3, 4, 5
_LONG_RUN = 3


@dataclass(frozen=True)
class Explanation:
    """All graphs that a program compiled, oldest first; prints as text.

    Attributes:
        graphs: one entry for each compiled graph.
        breaks: why Dynamo split the program into several graphs, each with ``file:line``, or compiles a function no more, in
            its own words.
        peak_bytes: the most that tensors took at once on the current device, by `torch.npu.max_memory_allocated`; None
            where no device was used.
        function: the name of what `explain(model, ...)` called; empty where it tells of a whole process.
        refused: what the stream check found in graphs that it refused, because of `stream_check="raise"`.
        loaded: how many saved compilations were loaded; `graphs` has those alone that were compiled.
    """

    graphs: tuple[GraphExplanation, ...]
    breaks: tuple[str, ...] = ()
    peak_bytes: int | None = None
    function: str = ""
    refused: tuple[Finding, ...] = ()
    loaded: int = 0

    def _nothing(self) -> str:
        """What is said where there is no graph."""
        if self.loaded:
            return (
                f"Nothing was compiled in this process: it loaded {counted(self.loaded, 'saved compilation')}. A program is "
                "explained where it compiles, with a folder that has no saved compilations."
            )
        if self.function:
            return (
                f"No graph of {self.function} was compiled: in these calls Dynamo gave this backend no operator of it."
            )
        return NOTHING_COMPILED

    def summary(self, again: str = "", started: str = "npugraph-ex") -> Facts | str:
        """One screen: how the graphs run, where they end, what was fused and what nearly, kernels, modelled time, captures.

        Args:
            again: the command line after `npugraph-ex explain`, from which rows with the next commands are made.
            started: what stands there for `npugraph-ex`, as with torchrun.
        """
        return summary(self, again, started) if self.graphs or self.breaks or self.refused else self._nothing()

    def in_short(self) -> list[Section]:
        """What plain text and a terminal show: each graph, and what the passes changed in it."""
        found = [part for entry in self.graphs for part in (entry.section(every_weight=False), entry.changes())]
        peak = (
            [Facts([("peak of all tensors", f"{self.peak_bytes:,} bytes")])] if self.graphs and self.peak_bytes else []
        )
        ends = [Section("memory", peak), Section("graph breaks", [Verbatim(reason) for reason in self.breaks])]
        return [*found, *(section for section in ends if section.blocks)]

    def __str__(self) -> str:
        return "\n\n".join([*map(str, self.in_short()), *([] if self.graphs else [self._nothing()])])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The same, in the width of a terminal."""
        yield from self.in_short()
        if not self.graphs:
            yield self._nothing()

    def page(self, *, title: str = "Explanation", further: Sequence[Section] = ()) -> Page:
        """The whole story as a page: graphs, before and after side by side, fusions, streams, captures, memory.

        Args:
            title: its heading.
            further: sections after those of the graphs: the modelled time.
        """
        overview = [
            (
                entry.graph.number, entry.graph.kernels_before, entry.graph.kernels_after, entry.graph.report.fusions(),
                len(entry.graph.report.near_misses()), len(entry.graph.report.streams), len(entry.captures),
                "" if entry.pool_bytes is None else f"{entry.pool_bytes:,}",
                f"{entry.graph.peak_before:,}", f"{entry.graph.peak_after:,}",
            )
            for entry in self.graphs
        ]  # fmt: skip
        headers = (
            "graph",
            "kernels before",
            "after",
            "fusions",
            "near-misses",
            "stream findings",
            "captures",
            "pool, bytes",
            "peak of results before",
            "after",
        )
        sections = [
            Section("All graphs", [PageTable(headers, overview)]),
            *(part for entry in self.graphs for part in (entry.section(), entry.side_by_side())),
            *further,
            Section("Graph breaks", [Verbatim(reason) for reason in self.breaks]),
        ]
        saved = sum(entry.graph.kernels_before - entry.graph.kernels_after for entry in self.graphs)
        verdict = f"{counted(len(self.graphs), 'graph')}; the passes saved {counted(saved, 'kernel')}."
        peak = (
            []
            if self.peak_bytes is None
            else [f"All tensors of the process took at most {self.peak_bytes:,} bytes at once."]
        )
        return Page(title, sections, verdict if self.graphs else self._nothing(), facts=peak)

    def _repr_html_(self) -> str:
        """The page, below a cell of a Jupyter notebook."""
        return self.page()._repr_html_()

    @property
    def streams(self) -> Findings:
        """What the stream check found in all graphs, and in those that it refused."""
        found = (finding for entry in self.graphs for finding in entry.graph.report.streams)
        return Findings((*found, *self.refused))

    def to_json(self) -> str:
        """All of it as JSON, one key a field."""
        return json.dumps(asdict(self), indent=2, default=str)


def collect(  # noqa: PLR0913 - what one report is made of
    *,
    graphs_after: int,
    captures_after: int,
    pools: Mapping[int, int],
    breaks: tuple[str, ...] = (),
    peak: int | None = None,
    function: str = "",
    refused: tuple[Finding, ...] = (),
    loaded: int = 0,
) -> Explanation:
    """Join what was recorded since two marks.

    Args:
        graphs_after: `graphs_so_far()` at the start.
        captures_after: `captures_so_far()` at the start.
        pools: bytes of the memory pool by graph number, for the graphs that are still alive.
        breaks: why the program is more than one graph.
        peak: the most bytes at once on the device.
        function: the name of what was called; empty for a whole process.
        refused: what the stream check found in graphs that it refused.
        loaded: how many saved compilations were loaded.
    """
    return Explanation(
        tuple(
            GraphExplanation(
                record, capture_records(after=captures_after, graph=record.number), pools.get(record.number)
            )
            for record in graph_records(after=graphs_after)
        ),
        breaks,
        peak,
        function,
        refused,
        loaded,
    )
