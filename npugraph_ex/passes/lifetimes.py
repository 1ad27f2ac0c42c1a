"""Prevents the allocator from reusing memory on its own stream while another stream still uses it.

A value's memory returns to the stream on which it was allocated as soon as the last node that uses it was launched. If that
node is on another stream, the memory's own stream may reuse the memory before the use is over. In eager mode variables live
longer, and `Tensor.record_stream` covers the rest. In a graph the compiler sees every use. If events do not already protect a
value, this pass extends its life up to the first work of its own stream that is ordered after all uses, or to the end of the
graph.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import fx

from npugraph_ex.graph.memory.aliases import AliasFacts, output_values
from npugraph_ex.graph.memory.regions import UNKNOWN
from npugraph_ex.graph.streams.events import MAIN, computes, has_several_streams, stream_of
from npugraph_ex.graph.streams.ops import KEEP_ALIVES, RECORD_STREAMS
from npugraph_ex.graph.streams.order import Order
from npugraph_ex.passes.base import PassContext


@dataclass
class _Life:
    """The memory of one or more values, from its allocation to its last use.

    Attributes:
        birth: the node that allocates it, perhaps with several results.
        value: a tensor in this memory.
        uses: the nodes that use it, in graph order.
    """

    birth: fx.Node
    value: fx.Node
    uses: list[fx.Node] = field(default_factory=list)

    def away(self) -> list[fx.Node]:
        """The uses on other streams than the one that allocated it."""
        return [node for node in self.uses if computes(node) and stream_of(node) != stream_of(self.birth)]


def run(gm: fx.GraphModule, context: PassContext) -> None:
    """Extend the lives in `gm.graph` that end too early."""
    del context
    graph = gm.graph
    if not has_several_streams(graph):
        return
    order = Order(graph)
    work: dict[str, list[fx.Node]] = {}
    for node in graph.nodes:
        if computes(node):
            work.setdefault(stream_of(node), []).append(node)
    for life in _lives(graph):
        away = life.away()
        if away:
            _protect(graph, life, away, order, work[stream_of(life.birth)])


def _lives(graph: fx.Graph) -> list[_Life]:
    """The lives of all memory that the graph allocates and does not return."""
    facts = AliasFacts(graph)
    lives: dict[int, _Life] = {}
    for node in graph.nodes:
        if node.op == "call_function" and computes(node):
            for root in facts.roots(node):
                lives.setdefault(root, _Life(node, node))
        for value in node.all_input_nodes:
            for root in facts.roots(value):
                if root in lives:
                    lives[root].uses.append(node)
                    if isinstance(value.meta["val"], torch.Tensor):
                        lives[root].value = value
    leaving = [node for node in output_values(graph) if isinstance(node, fx.Node)]
    given = [*leaving, *graph.find_nodes(op="placeholder"), *graph.find_nodes(op="get_attr")]
    spared = {UNKNOWN, *(root for node in given for root in facts.roots(node))}
    return [life for root, life in lives.items() if root not in spared and life.uses]


def _protect(graph: fx.Graph, life: _Life, away: list[fx.Node], order: Order, work: list[fx.Node]) -> None:
    """Extend one life as far as necessary."""
    last = life.uses[-1]
    home = stream_of(life.birth)
    after = [node for node in work if node > last]
    safe = next((node for node in after if all(order.proves(use, node) for use in away)), None)
    if after and safe is after[0]:
        return
    if safe is None and not after and home == MAIN:
        return  # the join before the graph's results orders all later work of the main stream
    if safe is not None:
        with graph.inserting_before(safe):
            keep = graph.call_function(KEEP_ALIVES[0], ([life.value],))
        _set_stream(keep, home)
        return
    for label in dict.fromkeys(stream_of(use) for use in away):
        with graph.inserting_after(last):
            record = graph.call_function(RECORD_STREAMS[0], (life.value, label))
        _set_stream(record, home)


def _set_stream(node: fx.Node, label: str) -> None:
    if label != MAIN:
        node.meta["stream_label"] = label
