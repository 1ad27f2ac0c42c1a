"""Streams and events in a graph after the first passes: the one representation that all later passes use.

* `node.meta["stream_label"]` names the stream of a node; without it the node is on the main stream, on which the graph is
  captured or called. `node.meta["stream_priority"]` is the priority from the scope.
* A `record` node records an event on the stream of its label, after all earlier nodes of that stream.
* A `wait` node makes the stream of its label wait for its arguments, which are `record` nodes: later nodes of that stream
  run after the recorded work.
* A `keep_alive` node uses its arguments and does nothing else, so their memory is not freed before it.
* A `record_stream` node declares that the named stream uses its tensor: the memory is not freed before that stream's work is
  over.

So the execution order is the list order of nodes with one label, plus an edge from each record to its waits, and nothing
else.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Sequence

from torch import fx
from torch._ops import OpOverload

from npugraph_ex.errors import ScopeError
from npugraph_ex.graph.composites import only_allocates
from npugraph_ex.graph.launches import launches
from npugraph_ex.graph.memory.aliases import tensor_leaves
from npugraph_ex.graph.streams.labels import MAIN as MAIN  # noqa: PLC0414 - part of what this module says
from npugraph_ex.graph.streams.ops import RECORD_STREAMS, RECORDS, WAITS, argument

TAG = "event_tag"
"""The key of ``node.meta`` with the tag of the user's event at a record or a wait, for messages."""

MARK = "event_closure"
"""The key of ``node.meta`` of the records and waits that the compiler inserted to close the graph's events."""


def stream_of(node: fx.Node) -> str:
    """The label of the stream on which `node` runs; `MAIN` for the main stream."""
    return str(node.meta.get("stream_label", MAIN))


def is_record(node: fx.Node) -> bool:
    """Whether `node` records an event."""
    return node.target in RECORDS


def is_wait(node: fx.Node) -> bool:
    """Whether `node` waits for events."""
    return node.target in WAITS


def orders_streams(node: fx.Node) -> bool:
    """Whether `node` is a record or a wait."""
    return is_record(node) or is_wait(node)


def is_record_stream(node: fx.Node) -> bool:
    """Whether `node` declares that a stream uses a tensor."""
    return node.target in RECORD_STREAMS


def awaited(wait: fx.Node) -> tuple[fx.Node, ...]:
    """The arguments of a `wait` node, in order."""
    return tuple(leaf for leaf in argument(wait, 0, "tensors", ()) if isinstance(leaf, fx.Node))


def computes(node: fx.Node) -> bool:
    """Whether `node` starts work on its stream. An unknown operation, such as a nested region, does."""
    if node.op in ("call_module", "call_method"):
        return True
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    return launches(node) if isinstance(node.target, OpOverload) else bool(tensor_leaves(node))


def allocates(node: fx.Node) -> bool:
    """Whether `node` only allocates memory, which is ready once the stream's earlier work is over."""
    return isinstance(node.target, OpOverload) and only_allocates(node.target)


def producers(tensor: fx.Node, computing: Container[fx.Node] | None = None) -> list[fx.Node]:
    """The nodes that compute the memory of `tensor`: the tensor itself, or its base if it is a view or a part.

    Args:
        tensor: a node whose value is a tensor.
        computing: the nodes that start work, if metadata is not up to date.
    """
    found: dict[fx.Node, None] = {}
    waiting = [tensor]
    while waiting:
        node = waiting.pop()
        if computes(node) if computing is None else node in computing:
            found[node] = None
        else:
            waiting.extend(source for source in node.all_input_nodes if tensor_leaves(source))
    return list(found)


def priorities(graph: fx.Graph) -> dict[str, int]:
    """Every side stream of `graph` with its priority, in the order of first use.

    Raises:
        ScopeError: one stream has two priorities.
    """
    found: dict[str, int | None] = {}
    for node in graph.nodes:
        label = stream_of(node)
        if label == MAIN or not (computes(node) or orders_streams(node)):
            continue
        priority = node.meta.get("stream_priority")
        earlier = found.setdefault(label, priority)
        if priority is not None and earlier is not None and earlier != priority:
            raise ScopeError(
                f"stream {label!r} is given the priorities {earlier} and {priority}; one tag is one stream, which has one"
            )
        found[label] = priority if earlier is None else earlier
    return {label: priority or 0 for label, priority in found.items()}


def begin(graph: fx.Graph) -> fx.Node:
    """The node after which work begins: the last input, or the graph's root if there are no inputs."""
    first: fx.Node = next(node for node in graph.nodes if node.op not in ("placeholder", "get_attr")).prev
    return first


def insert_record(graph: fx.Graph, after: fx.Node, label: str) -> fx.Node:
    """Insert a record of the stream `label` after a node."""
    with graph.inserting_after(after):
        record = graph.call_function(RECORDS[0])
    return _labelled(record, after, label)


def insert_wait(graph: fx.Graph, before: fx.Node, label: str, records: Sequence[fx.Node]) -> fx.Node:
    """Insert a wait of the stream `label` for records, before a node."""
    with graph.inserting_before(before):
        wait = graph.call_function(WAITS[0], (list(records),))
    return _labelled(wait, before, label)


def _labelled(node: fx.Node, neighbour: fx.Node, label: str) -> fx.Node:
    """Put a new node on a stream, with the stream's priority and limits at its neighbour."""
    if label != MAIN:
        node.meta["stream_label"] = label
        if stream_of(neighbour) == label and "stream_priority" in neighbour.meta:
            node.meta["stream_priority"] = neighbour.meta["stream_priority"]
    if "stack_trace" in neighbour.meta:
        node.meta["stack_trace"] = neighbour.meta["stack_trace"]
    return node


def has_several_streams(graph: fx.Graph) -> bool:
    """Whether nodes of the graph carry different stream labels, so that list order is not execution order."""
    labels = {node.meta.get("stream_label") for node in graph.nodes if node.op == "call_function"}
    return len(labels) > 1
