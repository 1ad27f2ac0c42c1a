"""Closes the events of a graph: every side stream begins after something, and everything is over before the results are.

* The fork: a side stream whose first node waits for nothing gets a wait for the earlier work of the main stream. Without a
  fork its work would not belong to a capture.
* The waits: a collective for which nothing waits, because its result is not used, gets a wait. Its group has a stream of its own.
* The join: before the results, the main stream waits for every stream whose work may not be over yet. The join stands before
  the copies into mutated inputs, because any stream may still read those inputs.

Work that is already ordered gets no event. The inserted nodes carry `meta["event_closure"]`.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from npugraph_ex.graph.collectives import is_asynchronous
from npugraph_ex.graph.streams.events import (
    MAIN,
    MARK,
    awaited,
    computes,
    insert_record,
    insert_wait,
    is_record,
    is_wait,
    orders_streams,
    priorities,
    stream_of,
)
from npugraph_ex.graph.streams.order import Clocks, Moment
from npugraph_ex.passes.base import PassContext


def run(gm: fx.GraphModule, context: PassContext) -> None:
    """Insert the forks and the join that `gm.graph` lacks."""
    del context
    _await_collectives(gm.graph)
    sides = list(priorities(gm.graph))
    if sides:
        _fork(gm.graph)
        _join(gm.graph, sides)


def _await_collectives(graph: fx.Graph) -> None:
    """Let the main stream wait for every collective before the graph writes results to inputs or returns."""
    end = None
    for node in [node for node in graph.nodes if is_asynchronous(node) and _is_unused(node)]:
        end = end or epilogue(graph)
        several = isinstance(node.meta["val"], (list, tuple))
        with graph.inserting_before(end):
            for result in [_part(graph, node, at) for at in range(len(node.meta["val"]))] if several else [node]:
                wait = graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (result,))  # noqa: SLF001
                wait.meta.update({"val": result.meta["val"], MARK: True})


def _is_unused(node: fx.Node) -> bool:
    """Whether nobody has its result. Who is given a result waits for it."""
    return all(user.target is operator.getitem and not user.users for user in node.users)


def _part(graph: fx.Graph, node: fx.Node, at: int) -> fx.Node:
    part = graph.call_function(operator.getitem, (node, at))
    part.meta.update({"val": node.meta["val"][at], MARK: True})
    return part


def _fork(graph: fx.Graph) -> None:
    """Make each side stream begin with a wait."""
    begun = {MAIN}
    for node in list(graph.nodes):
        label = stream_of(node)
        if label in begun or not (computes(node) or orders_streams(node)):
            continue
        begun.add(label)
        if is_wait(node):
            continue
        wait = insert_wait(graph, node, label, [])
        record = insert_record(graph, wait.prev, MAIN)
        wait.args = ([record],)
        wait.meta[MARK] = record.meta[MARK] = True


def _join(graph: fx.Graph, sides: list[str]) -> None:
    """Make the main stream wait for all others before the graph writes results to inputs or returns."""
    end = epilogue(graph)
    clocks = known_before(graph, end)
    late = [label for label in sides if not clocks.knows(MAIN, clocks.now(label))]
    if not late:
        return
    wait = insert_wait(graph, end, MAIN, [])
    wait.args = ([insert_record(graph, wait.prev, label) for label in late],)
    for node in (wait, *awaited(wait)):
        node.meta[MARK] = True


def epilogue(graph: fx.Graph) -> fx.Node:
    """The first of the copies into inputs at the end of the graph on the main stream; the output if there is none."""
    end: fx.Node = next(iter(graph.find_nodes(op="output")))
    node = end.prev
    while node.op == "call_function" and stream_of(node) == MAIN and not orders_streams(node):
        if _writes_back(node):
            end = node
        elif computes(node):
            break
        node = node.prev
    return end


def _writes_back(node: fx.Node) -> bool:
    target = node.args[0] if node.args else None
    return node.target is torch.ops.aten.copy_.default and isinstance(target, fx.Node) and target.op == "placeholder"


def known_before(graph: fx.Graph, end: fx.Node) -> Clocks:
    """The work that each stream knows to be over at `end`."""
    clocks = Clocks()
    recorded: dict[fx.Node, Moment] = {}
    for node in graph.nodes:
        if node is end:
            break
        if is_record(node):
            recorded[node] = clocks.now(stream_of(node))
        elif is_wait(node):
            for event in awaited(node):
                clocks.learn(stream_of(node), recorded[event].clock)
        elif computes(node):
            clocks.step(stream_of(node))
    return clocks
