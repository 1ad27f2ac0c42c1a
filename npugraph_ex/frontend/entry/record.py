"""Records the result of a compilation: the graph's record, and the description of its capture among the dumps."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tabulate import tabulate
from torch import fx

from npugraph_ex import _torch_private
from npugraph_ex.aclgraph import CompiledGraph
from npugraph_ex.aclgraph.host_updates import UpdatePlan
from npugraph_ex.aclgraph.obstacles import find_obstacles
from npugraph_ex.config import Options
from npugraph_ex.graph.composites import kernels_of_call
from npugraph_ex.graph.launches import bytes_of, launches
from npugraph_ex.graph.memory.aliases import AliasFacts, mutated_inputs
from npugraph_ex.graph.memory.lifetimes import alive_bytes
from npugraph_ex.graph.source import compiled_line, source_line
from npugraph_ex.graph.streams.events import stream_of
from npugraph_ex.report import graphs
from npugraph_ex.report.graphs import CallRecord, Fate, GraphRecord, InputClass, InputRecord
from npugraph_ex.report.passes import PassReport
from npugraph_ex.report.recompilations import in_words


def record(  # noqa: PLR0913 - the parts of one compilation
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    names: Sequence[str],
    options: Options,
    compiled: Callable[..., Any],
    *,
    static: Sequence[int],
    number: int,
    report: PassReport,
    before: tuple[CallRecord, ...],
    cause: str = "",
    trained: bool = False,
) -> GraphRecord:
    """Make and publish the record of one compiled graph, after all passes; ``static`` are its parameters and buffers."""
    obstacles = tuple(str(obstacle) for obstacle in find_obstacles(gm, UpdatePlan.from_graph(gm), names))
    facts = AliasFacts(gm.graph)
    after = nodes_of(gm.graph, facts)
    made = GraphRecord(
        number=number,
        fate=_fate(gm, compiled, options, obstacles),
        inputs=_inputs(gm.graph, mutated_inputs(gm.graph, facts), example_inputs, names, compiled, static),
        report=report,
        kernels_before=sum(node.kernels for node in before),
        kernels_after=sum(node.kernels for node in after),
        obstacles=obstacles,
        options=tuple((name, repr(value)) for name, value in options.changed().items()),
        before=before,
        after=after,
        peak_before=_peak(before),
        peak_after=_peak(after),
        cause=cause or _cause(),
        trained=trained,
        place=next(filter(None, map(compiled_line, gm.graph.nodes)), ""),
    )
    graphs.publish(made)
    return made


def record_as_traced(gm: fx.GraphModule, reason: str) -> None:
    """Publish the record of a Dynamo graph that runs as it was traced; no pass saw it, and nothing counts its kernels."""
    place = next(filter(None, map(compiled_line, gm.graph.nodes)), "")
    made = GraphRecord(
        graphs.next_number(), "not capturable", (), PassReport(), 0, 0, (reason,), cause=_cause(), place=place
    )
    graphs.publish(made)


def nodes_of(graph: fx.Graph, facts: AliasFacts | None = None) -> tuple[CallRecord, ...]:
    """The calls of a graph, in order; what only takes a result out of a tuple is none."""
    alive = alive_bytes(graph, facts or AliasFacts(graph))
    calls = [
        node for node in graph.nodes if node.op not in {"placeholder", "output"} and node.target is not operator.getitem
    ]
    return tuple(_call_of(node, alive[node]) for node in calls)


def _call_of(node: fx.Node, alive: int) -> CallRecord:
    starts = launches(node)
    return CallRecord(
        name=node.name,
        operator=str(node.target),
        stream=stream_of(node),
        source=source_line(node),
        kernel=starts,
        alive_bytes=alive,
        moved_bytes=bytes_of(node) if starts else 0,
        kernels=kernels_of_call(node) if starts else 0,
    )


def _cause() -> str:
    """Why Dynamo compiles now."""
    changed = in_words(_torch_private.recompile_reason(), _torch_private.pinned_sizes())
    return f"again: {changed}" if changed else "for the first call"


def _peak(calls: Sequence[CallRecord]) -> int:
    return max((call.alive_bytes for call in calls), default=0)


def _fate(gm: fx.GraphModule, compiled: Callable[..., Any], options: Options, obstacles: tuple[str, ...]) -> Fate:
    if isinstance(compiled, CompiledGraph):
        return "captured"
    if options.dump_tensor_data:
        return "dumped"
    if options.force_eager:
        return "force_eager"
    return "not capturable" if obstacles and gm.graph.nodes else "nothing to run"


def _inputs(
    graph: fx.Graph,
    written: frozenset[int],
    example_inputs: Sequence[Any],
    names: Sequence[str],
    compiled: Callable[..., Any],
    static: Sequence[int],
) -> tuple[InputRecord, ...]:
    kinds: dict[int, InputClass] = {}
    placeholders = graph.find_nodes(op="placeholder")
    if isinstance(compiled, CompiledGraph):
        plan = compiled.plan
        kinds.update(dict.fromkeys(plan.in_place, "in place"))
        kinds.update(dict.fromkeys(plan.copied, "copied"))
        kinds.update(dict.fromkeys((*plan.keyed, *plan.scalars), "key"))
        kinds.update(dict.fromkeys(plan.updates.positions if plan.updates else (), "updated"))
    return tuple(
        InputRecord(
            name,
            kinds.get(position, "as given"),
            position in written,
            _described(value),
            value.numel() * value.element_size() if position in static and isinstance(value, torch.Tensor) else 0,
        )
        for position, (node, name, value) in enumerate(zip(placeholders, names, example_inputs, strict=True))
        if not _torch_private.is_effect_token(node)
    )


def _described(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return str(value)
    sizes = ", ".join(str(size) for size in value.shape)
    return f"{str(value.dtype).removeprefix('torch.')}[{sizes}] {value.device}"


def description(made: GraphRecord) -> str:
    """The record as text for the dumps: how the graph runs, and its inputs by class."""
    rows = [(entry.name, entry.kind, "yes" if entry.mutated else "", entry.value) for entry in made.inputs]
    parts = [
        f"graph {made.number}: {made.fate}; kernels: {made.kernels_before} before the passes, {made.kernels_after} after",
        tabulate(rows, headers=("input", "class", "mutated", "value"), tablefmt="simple"),
        *(f"cannot be captured: {obstacle}" for obstacle in made.obstacles),
    ]
    return "\n\n".join(parts) + "\n"
