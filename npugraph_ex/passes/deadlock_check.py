"""The deadlock check: collectives that may run at the same time and together need more vector cores than the device has.

A collective occupies its cores until its peers take part. If no event orders two collectives and the device has not enough
cores for both, one process may start the first and another process the second. Then each waits for ever for its peer. Kernels
that do not communicate end by themselves and do not count.

Only CANN knows how many cores a collective takes. It takes at most the limit of its scope, or all cores without a limit.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import fx

from npugraph_ex.errors import CollectiveDeadlockWarning
from npugraph_ex.graph.collectives import group_of, is_asynchronous, is_collective, waits_of
from npugraph_ex.graph.streams.events import stream_of
from npugraph_ex.graph.streams.labels import KEPT
from npugraph_ex.graph.streams.order import Order
from npugraph_ex.passes.base import PassContext
from npugraph_ex.report.findings import Code, Finding, Findings, warn_at
from npugraph_ex.stream_check.repair_hints import location


class _CollectiveCall(NamedTuple):
    """A collective, its queue, the vector cores that it may take, and the nodes before which it is over."""

    node: fx.Node
    queue: tuple[str, str]
    cores: int
    ends: Sequence[fx.Node]


def run(gm: fx.GraphModule, context: PassContext) -> None:
    """Add the findings of the final graph to the report, and warn. It raises nothing and changes nothing."""
    if context.vector_cores is None:
        return
    found = analyse(gm.graph, context.vector_cores)
    for finding in found:
        context.report.add_finding(finding)
    if found:
        text = f"Processes may wait for each other for ever:\n{found}"
        warn_at(found.found[0], text, CollectiveDeadlockWarning)


def analyse(graph: fx.Graph, vector_cores: int) -> Findings:
    """Find collectives that may run at the same time and need too many cores.

    Args:
        graph: labelled, with ``record`` and ``wait`` nodes as in `events`.
        vector_cores: the device's number of vector cores.

    Returns:
        For each collective at most one finding: the set of earlier collectives that needs most cores.
    """
    order = Order(graph)
    collectives = [_described(node, vector_cores) for node in graph.nodes if is_collective(node) and _takes_cores(node)]
    found: list[Finding] = []
    for position, last in enumerate(collectives):
        earlier = [one for one in collectives[:position] if not _ordered(one, last, order)]
        together = next(_too_many(earlier, [last], vector_cores, order), None)
        if together is not None:
            found.append(_finding(together, vector_cores))
    return Findings(tuple(found))


def _takes_cores(node: fx.Node) -> bool:
    """Whether a collective runs on vector cores, as torch.distributed's do unless HCCL is configured differently."""
    return not is_asynchronous(node) or os.environ.get("HCCL_OP_EXPANSION_MODE", "AIV") == "AIV"


def _described(node: fx.Node, vector_cores: int) -> _CollectiveCall:
    _, limit = node.meta.get("core_limit", (KEPT, KEPT))
    cores = vector_cores if limit == KEPT else min(limit, vector_cores)
    if is_asynchronous(node):  # its group's own stream, whichever stream starts it
        return _CollectiveCall(node, ("group", group_of(node)), cores, waits_of(node))
    return _CollectiveCall(node, ("stream", stream_of(node)), cores, [node])


def _ordered(first: _CollectiveCall, second: _CollectiveCall, order: Order) -> bool:
    """Whether ``first``, which is earlier in the list, is over before ``second`` begins, on every schedule."""
    if first.queue == second.queue:
        return True
    return any(end is second.node or order.proves(end, second.node) for end in first.ends)


def _too_many(
    others: Sequence[_CollectiveCall], chosen: list[_CollectiveCall], vector_cores: int, order: Order
) -> Iterator[list[_CollectiveCall]]:
    """Sets of collectives that may run at the same time and together need too many cores.

    The sets with the fewest and largest members come first.

    Args:
        others: the candidates; no event orders one of them with one of ``chosen``.
        chosen: the collectives chosen so far.
        vector_cores: the device's number of vector cores.
        order: the graph's order.
    """
    needed = sum(one.cores for one in chosen)
    if needed > vector_cores:
        yield chosen
        return
    most = {one.queue: 0 for one in others}
    for one in others:
        most[one.queue] = max(most[one.queue], one.cores)
    if needed + sum(most.values()) <= vector_cores:
        return  # every choice fits
    for one in sorted(others, key=lambda other: -other.cores):
        rest = [
            other
            for other in others
            if other.node < one.node and not _ordered(other, one, order)
        ]  # fmt: skip
        yield from _too_many(rest, [*chosen, one], vector_cores, order)


def _finding(together: Sequence[_CollectiveCall], vector_cores: int) -> Finding:
    last, *others = together
    needed = sum(one.cores for one in together)
    names = " and ".join(f"{one.node.name} ({one.cores})" for one in sorted(together, key=lambda one: one.node))
    share = vector_cores // len(together)
    return Finding(
        Code.COLLECTIVES_EXCEED_CORES,
        f"{names} may run at once and need {needed} vector cores; the device has {vector_cores}, so that each may occupy "
        "cores that another waits for",
        location(others[0].node),
        location(last.node),
        f"{others[0].node.name} before {last.node.name}",
        f"put each under `with npugraph_ex.scope.limit_core_num(-1, {share})`, or let an event order them",
    )
