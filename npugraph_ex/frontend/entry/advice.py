"""What could be fused in the graphs of a program and is not, what that would win, and what to change for it.

Each graph is compiled a second time beside its compilation, on a copy: with every fusion rule, and with ``lift="judged"``. What
the copy fuses besides is won by options. What stays in it is won by another spelling: projections of one input, and near-misses
that know the lines to write. A near-miss that knows none is told with its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import fx

from npugraph_ex._plurals import counted
from npugraph_ex.config import Options
from npugraph_ex.frontend.entry.shared_projections import shared_projections
from npugraph_ex.fusion.rules import RULE_NAMES, is_usable
from npugraph_ex.graph.launches import NOTHING, Launched
from npugraph_ex.report.passes import NearMiss, PassReport

_DECLARED = 'options={{"lift": "judged", "{0}": True}}, if it is so: see `npugraph-ex options {0}`'
_LIFTED = '\n# with options={"lift": "judged"}, without which they may start more kernels'
Kind = Literal["option", "declaration", "spelling", "refused"]


@dataclass(frozen=True)
class Advice:
    """One change of a program.

    Attributes:
        graph: the number of the compiled graph.
        kind: "option" is won by an option, "declaration" by one that says something of the model, "spelling" by other lines in
            it; "refused" stays as it is, for a reason.
        rule: the fusion that would apply.
        source: ``file:line`` of the model.
        times: how often it occurs there.
        saves: kernels and bytes a call of the graph, all occurrences together.
        change: the option, the lines, or the reason.
        why: of other lines, why the program's own stay: what the two compute differently, and how far apart where that is known.
        costs: what lines that save at this place in other graphs would start here besides.
    """

    graph: int
    kind: Kind
    rule: str
    source: str
    times: int
    saves: Launched
    change: str
    why: str = ""
    costs: Launched = NOTHING


def advice_on(  # noqa: PLR0913 - the parts of one compilation
    number: int,
    traced: fx.GraphModule,
    options: Options,
    report: PassReport,
    compiled: Callable[[fx.GraphModule, Options], PassReport],
    *,
    names: Sequence[str] = (),
    trained: bool = False,
) -> list[Advice]:
    """What would be won in one graph.

    Args:
        number: of the graph.
        traced: AOT's graph, before any pass; it is edited.
        options: those that the program has.
        report: what the passes did with them.
        compiled: runs the passes with other options, in place.
        names: the user's names of the graph's inputs, in order.
        trained: whether a backward belongs to it. No advice joins its weights then, for a joined weight would go stale.
    """
    every = dict.fromkeys(filter(is_usable, RULE_NAMES), True) | (options.fusion_rules or {})
    best = replace(options, lift="judged", fusion_rules=every, pattern_fusion_pass=True, dump_tensor_data=False)
    inputs = dict(zip(traced.graph.find_nodes(op="placeholder"), names, strict=False))
    found = compiled(traced, best)
    joined = [] if trained else shared_projections(traced.graph, inputs, lifted=options.lift == "judged")
    made = _fusions(number, found, options)
    had = {(one.rule, one.source): one for one in _fusions(number, report, options)}
    won = [_besides(one, had.get((one.rule, one.source))) for one in made]
    return [
        *(one for one in won if one is not None),
        *(
            Advice(number, "spelling", "shared projection", one.source, one.times, one.saves, one.change)
            for one in joined
        ),
        *_near_misses(number, found, options),
    ]


def _fusions(number: int, report: PassReport, options: Options) -> list[Advice]:
    """Each rule at each line, with what all its fusions there save."""
    found: dict[tuple[str, str], Advice] = {}
    for record in report.rules:
        change = (
            'options={"lift": "judged"}'
            if record.name.startswith("lift_")
            else f'options={{"fusion_rules": {{"{record.name}": True}}}}'
            if options.pattern_fusion_pass
            else 'options={"pattern_fusion_pass": True}'
        )
        for fusion in record.fusions:
            key = record.name, fusion.source
            old = found.get(key, Advice(number, "option", *key, 0, NOTHING, change))
            found[key] = replace(old, times=old.times + 1, saves=old.saves + fusion.saves)
    return list(found.values())


def _besides(one: Advice, had: Advice | None) -> Advice | None:
    """What is won besides what the program has."""
    more = one if had is None else replace(one, times=one.times - had.times, saves=one.saves - had.saves)
    return more if more.times > 0 and more.saves.kernels > 0 else None


def _near_misses(number: int, report: PassReport, options: Options) -> Iterator[Advice]:
    found: dict[tuple[str, str, str, Kind], Advice] = {}

    def tell(miss: NearMiss, kind: Kind, change: str, saves: Launched) -> None:
        key = miss.rule, miss.source, miss.reason, kind
        why = miss.reason if kind == "spelling" else ""
        old = found.get(key, Advice(number, kind, miss.rule, miss.source, 0, NOTHING, change, why))
        costs = old.costs + miss.would_cost
        found[key] = replace(old, times=old.times + 1, saves=old.saves + saves, costs=costs)

    for miss in report.near_misses():
        if miss.option:
            tell(miss, "declaration", _DECLARED.format(miss.option), miss.option_saves)
        lines = miss.lines + (
            _LIFTED if miss.lines and miss.rule.startswith("lift_") and options.lift != "judged" else ""
        )
        tell(miss, "spelling" if lines else "refused", lines or miss.reason, miss.would_save)
    yield from found.values()


def over_all_graphs(found: Sequence[Advice]) -> list[Advice]:
    """The advice on all graphs, in which lines that cost kernels in some graphs have a row for each of these.

    One line of a model is compiled for several dtypes, shapes and callers. Where its other spelling costs as many kernels as it
    saves, it is not advised.
    """
    at: dict[tuple[str, str], list[Advice]] = {}
    for one in found:
        at.setdefault((one.rule, one.source), []).append(one)
    return [told for those in at.values() for told in _at_one_line(those)]


def _at_one_line(those: Sequence[Advice]) -> Sequence[Advice]:
    lines = [one for one in those if one.kind == "spelling" and one.saves.kernels > 0]
    losing = [one for one in those if one.kind == "refused" and one.costs.kernels > 0]
    if not lines:
        return those
    gaining = {one.graph for one in lines}
    won, lost = (sum(of) for of in ([one.saves.kernels for one in lines], [one.costs.kernels for one in losing]))
    rest = [one for one in those if one not in (*lines, *losing)]
    if won > lost:
        unknown = _graphs(one for one in rest if one.kind == "refused" and one.graph not in gaining)
        note = f"\n# in {unknown} they are no such form, and what they start there is not counted" if unknown else ""
        told = [replace(one, change=one.change + note) for one in lines]
        return [*rest, *told, *(_by_lines(one, told[0]) for one in losing)]
    reason = f"other lines would save {counted(won, 'kernel')} in {_graphs(lines)}, and start {lost} more in {_graphs(losing)}"
    return [*rest, *(replace(one, kind="refused", saves=NOTHING, change=reason, why="") for one in lines), *losing]


def _graphs(rows: Iterable[Advice]) -> str:
    """As in "graphs 1, 3"; empty for no rows."""
    numbers = sorted({one.graph for one in rows})
    return f"graph{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}" if numbers else ""


def _by_lines(one: Advice, lines: Advice) -> Advice:
    """A row of what the lines cost."""
    return replace(one, kind="spelling", saves=NOTHING - one.costs, change=lines.change, why=lines.why, costs=NOTHING)
