"""Methods of streams and events that Dynamo leaves in its graph as calls of the objects."""

from __future__ import annotations

from torch import fx

from npugraph_ex.versions.difference import VersionDifference

DIFFERENCE = VersionDifference(
    what="Torch 2.12 traces the methods of streams and events as operators; before, only `Event.record(stream)` and `Event.wait`.",
    since=(2, 12),
    test="tests/streams/test_around_the_call.py",
)
REFUSED = "which this release of torch does not trace in order"
"""The part of the refusal by which tests know that a release cannot run their program."""
_METHODS = frozenset({"wait_stream", "wait_event", "record_event", "synchronize"})


def untraced_method(node: fx.Node) -> str:
    """The method of a stream or event that a node calls in a form without order, which AOT would drop; empty for other nodes."""
    import torch

    if not DIFFERENCE.older:
        return ""
    if node.op == "call_method" and node.target in _METHODS:
        return str(node.target)
    on_the_current_stream = node.target in {torch.ops.streams.record_event, torch.ops.streams.wait_event}
    return "an event on `torch.npu.current_stream()`" if on_the_current_stream and node.args[1] is None else ""
