"""What passes need to know about streams: whether the order of the node list is the order of execution."""

from __future__ import annotations

from torch import fx


def has_several_streams(graph: fx.Graph) -> bool:
    """Whether nodes of the graph carry different stream labels, so that list order does not order them."""
    labels = {node.meta.get("stream_label") for node in graph.nodes if node.op == "call_function"}
    return len(labels) > 1
