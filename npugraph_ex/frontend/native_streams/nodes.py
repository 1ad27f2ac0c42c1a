"""Native streams and events in a Dynamo graph: the nodes that mention them, and the stream of each node.

Dynamo annotates each node with the stream of the `with` block around it, and traces waits and records as operators that
take numbers of stream and event objects; `_torch_private.traced_object` has the objects.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from npugraph_ex import _torch_private
from npugraph_ex.graph.streams.ops import ENTERS, EXITS
from npugraph_ex.versions.stream_operators import host_wait

streams = torch.ops.streams
"""Dynamo's operators on streams and events."""
SYNCHRONIZE_STREAM, SYNCHRONIZE_EVENT, SYNCHRONIZE_DEVICE = map(host_wait, ("stream", "event", "device"))


def annotated(node: fx.Node) -> int | None:
    """The number of the stream of the `with` block in which a node was traced."""
    number = (node.meta.get("custom") or {}).get("stream")
    return number if isinstance(number, int) else None


def mentioned(node: fx.Node) -> list[int]:
    """The numbers of the streams that a node mentions."""
    arguments: Any = node.args
    found = [number for number in (annotated(node),) if number is not None]
    if node.target in (streams.record_event, streams.wait_event, streams.record_stream):
        found.append(arguments[1])
    elif node.target is streams.wait_stream:
        found += arguments
    elif node.target is SYNCHRONIZE_STREAM:
        found.append(arguments[0])
    return found


def is_context(node: object, name: str) -> bool:
    """Whether a node calls torch_npu's function of that name."""
    target = node.target if isinstance(node, fx.Node) and node.op == "call_function" else None
    return getattr(target, "__name__", "") == name and (getattr(target, "__module__", "") or "").startswith("torch_npu")


def is_left_over(node: object) -> bool:
    """Whether a node only fetches a stream or event object, or makes one current: annotations contain the same."""
    fetches = isinstance(node, fx.Node) and node.op == "call_function" and _torch_private.fetches_traced_object(node)
    return fetches or is_context(node, "current_stream") or is_context(node, "set_stream")


def is_query(node: fx.Node) -> bool:
    """Whether a node asks if a stream or an event is done."""
    return node.op == "call_method" and node.target == "query" and is_left_over(node.args[0])


def is_device_wide(node: fx.Node) -> bool:
    """Whether the host waits for the whole device at a node."""
    return node.target is SYNCHRONIZE_DEVICE or is_context(node, "synchronize")


def is_host_wait(node: fx.Node) -> bool:
    """Whether the host waits for something at a node."""
    return node.target in (SYNCHRONIZE_EVENT, SYNCHRONIZE_STREAM) or is_device_wide(node)


def is_native(node: fx.Node) -> bool:
    """Whether a node is an operator on streams or events."""
    packet = getattr(node.target, "overloadpacket", node.target)
    of_streams = isinstance(packet, torch._ops.OpOverloadPacket) and str(packet).startswith("streams.")
    return of_streams or is_device_wide(node)


def opens_scope(node: fx.Node) -> bool:
    """Whether a node opens a scope of this library."""
    packet = getattr(node.target, "overloadpacket", node.target)
    return any(packet is operator.overloadpacket for operator in ENTERS)


def is_scope(node: fx.Node) -> bool:
    """Whether a node opens or closes a scope of this library."""
    packet = getattr(node.target, "overloadpacket", node.target)
    return opens_scope(node) or any(packet is operator.overloadpacket for operator in EXITS)


def names_streams(graph: fx.Graph) -> bool:
    """Whether a Dynamo graph uses native streams or events at all."""
    return any(annotated(node) is not None or is_left_over(node) or is_native(node) for node in graph.nodes)


def has_work(graph: fx.Graph) -> bool:
    """Whether a Dynamo graph computes anything, apart from the host's calls on streams and events."""
    calls = (node for node in graph.nodes if node.op.startswith("call_"))
    return any(not is_left_over(node) and not is_native(node) for node in calls)
