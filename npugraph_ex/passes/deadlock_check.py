"""The deadlock check: collectives that may run at once and together need more vector cores than there are.

A collective holds its cores until its peers have come. Where two that no event orders do not fit onto the device together,
one process may start the one first and another process the other, and each waits for ever for its peer to begin. Kernels that
do not communicate end by themselves, so they count for nothing here.

How many cores a collective will take only CANN knows; the most it may take is the limit of its scope, or else all of them.
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
    """A collective, the queue that it runs in, the vector cores that it may take, and the nodes before which it is over."""

    node: fx.Node
    queue: tuple[str, str]
    cores: int
    ends: Sequence[fx.Node]


def run(gm: fx.GraphModule, context: PassContext) -> None:
    """Add what is found in the final graph to the report, and warn; nothing is ever raised or changed."""
    if context.vector_cores is None:
        return
    found = analyse(gm.graph, context.vector_cores)
    for finding in found:
        context.report.add_finding(finding)
    if found:
        text = f"Processes may wait for each other for ever:\n{found}"
        warn_at(found.found[0], text, CollectiveDeadlockWarning)


def analyse(graph: fx.Graph, vector_cores: int) -> Findings:
    """Find collectives that may run at once and do not fit.

    Args:
        graph: labelled, with ``record`` and ``wait`` nodes as in `events`.
        vector_cores: how many the device has.

    Returns:
        For each collective at most one finding, with the earlier one that needs most cores of those it meets.
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
    """Whether a collective runs on vector cores: those of torch.distributed do unless HCCL is told otherwise."""
    return not is_asynchronous(node) or os.environ.get("HCCL_OP_EXPANSION_MODE", "AIV") == "AIV"


def _described(node: fx.Node, vector_cores: int) -> _CollectiveCall:
    _, limit = node.meta.get("core_limit", (KEPT, KEPT))
    cores = vector_cores if limit == KEPT else min(limit, vector_cores)
    if is_asynchronous(node):  # a stream of its group's own, whichever stream it is started from
        return _CollectiveCall(node, ("group", group_of(node)), cores, waits_of(node))
    return _CollectiveCall(node, ("stream", stream_of(node)), cores, [node])


def _ordered(first: _CollectiveCall, second: _CollectiveCall, order: Order) -> bool:
    """Whether ``first`` is over before ``second`` begins, on every schedule; it stands before it in the list."""
    if first.queue == second.queue:
        return True
    return any(end is second.node or order.proves(end, second.node) for end in first.ends)


def _too_many(
    others: Sequence[_CollectiveCall], chosen: list[_CollectiveCall], vector_cores: int, order: Order
) -> Iterator[list[_CollectiveCall]]:
    """Sets of collectives that may run at once and need too many cores, those with the fewest and largest members first.

    Args:
        others: what may still be chosen: nothing orders one of them with one of ``chosen``.
        chosen: what was chosen so far.
        vector_cores: how many there are.
        order: of the graph.
    """
    needed = sum(one.cores for one in chosen)
    if needed > vector_cores:
        yield chosen
        return
    most = {one.queue: 0 for one in others}
    for one in others:
        most[one.queue] = max(most[one.queue], one.cores)
    if needed + sum(most.values()) <= vector_cores:
        return  # whatever is chosen, it fits
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
        f"{names} may run at once and need {needed} vector cores; the device has {vector_cores}, so that each may hold "
        "what another waits for",
        location(others[0].node),
        location(last.node),
        f"{others[0].node.name} before {last.node.name}",
        f"put each under `with npugraph_ex.scope.limit_core_num(-1, {share})`, or let an event order them",
    )
