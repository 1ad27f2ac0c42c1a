"""`summary`: an explanation on one screen: how graphs run, where they end, what was fused, what a call costs, what to do next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from npu_emulator.pages import Facts
from npugraph_ex._plurals import counted, noun
from npugraph_ex.graph.launches import NOTHING, Launched
from npugraph_ex.observe.modelled import chip, modelled_us
from npugraph_ex.report.names import shown_name

if TYPE_CHECKING:
    from npugraph_ex.observe.explain import Explanation
    from npugraph_ex.report.graphs import CallRecord
    from npugraph_ex.report.passes import Branch, NearMiss

FATES = {
    "captured": "captured graphs, replayed",
    "force_eager": "operator by operator, because of force_eager",
    "dumped": "operator by operator, because of dump_tensor_data",
    "not capturable": "operator by operator, because it cannot be captured",
    "nothing to run": "it has nothing to run on the device",
}
"""How a call of a graph runs, in words."""
BACKWARD = "operator by operator, and counted nowhere here"
"""How the backward half of a trained graph runs."""
_MOST = 3
"""Rows of a kind; behind them stands how many more there are."""


def summary(found: Explanation, again: str = "", started: str = "npugraph-ex") -> Facts:
    """The rows, the most urgent question first.

    Args:
        found: of at least one graph, a break, or a refused graph.
        again: how the program is explained again, as in ``--emulate script.py``; without it no further commands are named.
        started: how a command that runs the program is started.
    """
    graphs = [entry.graph for entry in found.graphs]
    rows: list[tuple[str, object]] = []
    for fate in dict.fromkeys(graph.fate for graph in graphs):
        numbers = [str(graph.number) for graph in graphs if graph.fate == fate]
        rows.append(("runs as", f"{FATES[fate]}: {noun(len(numbers), 'graph')} {_few(numbers)}"))
    if found.loaded:
        rows.append(("loaded", f"{counted(found.loaded, 'saved compilation')}, of which nothing more is known here"))
    trained = [str(graph.number) for graph in graphs if graph.trained]
    if trained:
        rows.append(
            (
                "backward",
                f"of {noun(len(trained), 'graph')} {_few(trained)}: {BACKWARD}",
            )
        )
    rows += _some("not capturable", (f"graph {one.number}: {why}" for one in graphs for why in one.obstacles))
    rows += _some("refused", (f"{one.level} {one.code}: {one.message}" for one in found.refused))
    rows += _some("graph break", (reason.splitlines()[0] for reason in found.breaks))
    rows += _some("compiled", (f"graph {one.number} {one.cause}" for one in graphs if one.cause.startswith("again")))
    if graphs:
        rows += _work(
            chain.from_iterable(one.before for one in graphs), chain.from_iterable(one.after for one in graphs)
        )
    fused = Counter(shown_name(rule.name) for one in graphs for rule in one.report.rules for _ in rule.fusions)
    off = next((f", because {one.report.rules_off}" for one in graphs if one.report.rules_off), "")
    rows.append(("fused", _with_counts(fused) or f"nothing{off}"))
    rows += _some(
        "rolled back", (f"graph {one.number}: {it.undone()}" for one in graphs for it in one.report.rolled_back)
    )
    rows += _some("not compared", (f"graph {one.number}: {why}" for one in graphs for why in one.report.uncompared))
    rows += _some("near-miss", _misses(miss for one in graphs for miss in one.report.near_misses()))
    rows += _some("norm not fused", _misses(miss for one in graphs for miss in one.report.unfused))
    rows += _some("side stream", (_beside(branch) for one in graphs for branch in one.report.branches))
    rows += _some("stream check", (f"{one.shown_level} {one.code}: {one.message}" for one in found.streams))
    rows.append(
        (
            "captures",
            _with_counts(Counter(one.reason for entry in found.graphs for one in entry.captures), "; ") or "none",
        )
    )
    pools = sum(entry.pool_bytes or 0 for entry in found.graphs)
    peak = f"; at most {found.peak_bytes:,} bytes in all tensors at once" if found.peak_bytes else ""
    rows.append(("memory", f"{pools:,} bytes in the pools of the captures{peak}"))
    rows += _next(found, again, started) if again else ()
    names = ["", *(name for name, _ in rows)]
    return Facts([("" if name == earlier else name, said) for earlier, (name, said) in zip(names, rows, strict=False)])


def _few(names: Sequence[str]) -> str:
    return ", ".join(names if len(names) <= 2 * _MOST else [*names[:_MOST], "…", names[-1]])


def _some(name: str, said: Iterable[str]) -> list[tuple[str, object]]:
    """A row for each of the first few different texts."""
    texts = list(dict.fromkeys(said))
    rows: list[tuple[str, object]] = [(name, text) for text in texts[:_MOST]]
    return rows + ([(name, f"… and {len(texts) - _MOST} more")] if len(texts) > _MOST else [])


def _with_counts(counts: Counter[str], between: str = ", ") -> str:
    """The number of all, and of each how many if not one, the most first."""
    each = [name if times == 1 else f"{name} ({times})" for name, times in counts.most_common()]
    more = [f"and {len(each) - 2 * _MOST} more"] if len(each) > 2 * _MOST else []
    return f"{counts.total()}: {between.join([*each[: 2 * _MOST], *more])}" if each else ""


def _misses(misses: Iterable[NearMiss]) -> Iterator[str]:
    """Alike ones once, with how often."""
    times = Counter((miss.rule, miss.reason, miss.source) for miss in misses)
    for (rule, reason, source), count in times.most_common():
        said = f"{shown_name(rule)}: {reason}" if rule else reason
        yield f"{said}{f' ({source})' if source else ''}{f', {count} times' if count > 1 else ''}"


def _beside(branch: Branch) -> str:
    source = f" ({branch.source})" if branch.source else ""
    return (
        f"{counted(len(branch.nodes), 'kernel')} from {branch.nodes[0]}: {branch.saves_us:.2f} us won, modelled{source}"
    )


def _work(before: Iterable[CallRecord], after: Iterable[CallRecord]) -> Iterator[tuple[str, object]]:
    """Kernels and modelled time of a call of each graph."""
    old, new = map(_launched, (before, after))
    yield "kernels", f"{old.kernels} before the passes, {new.kernels} after: {old.kernels - new.kernels} saved"
    said = f"starts and bytes of the kernels on an {chip().name}"
    yield "modelled time", f"{modelled_us(old):.1f} us before the passes, {modelled_us(new):.1f} us after: {said}"


def _launched(calls: Iterable[CallRecord]) -> Launched:
    return sum((Launched(one.kernels, one.moved_bytes) for one in calls if one.kernel), NOTHING)


def _next(found: Explanation, again: str, started: str) -> Iterator[tuple[str, object]]:
    """Commands that lead on from here."""
    graphs = [entry.graph for entry in found.graphs]
    steps = []
    if found.breaks:
        steps.append("npugraph-ex help Unsupported  # why a graph ends, and the remedy")
    if any(graph.fate == "not capturable" for graph in graphs):
        steps.append("npugraph-ex help CaptureError  # what keeps a graph from being captured, and the remedy")
    steps += [
        f"{started} advise {again}  # what else could be fused, and the lines to change",
        f"{started} explain --full {again}  # all tables; --html FILE: as a page",
    ]
    yield from (("next", step) for step in steps)
