"""One program with three streams in every form in which streams can be written, all of which must compute the same.

A trunk, two branches that depend on it, each on a stream of its own, and a join. The forms: tagged events in scopes; native
events; native ``wait_stream``; and custom passes that insert the operators of either namespace into the plain program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from npugraph_ex import ops, scope

STREAMS = 3
"""On how many streams each form runs."""


def plain(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The program without streams: two branches that depend on a trunk, and a join."""
    trunk = x + 1
    left = trunk * 2
    right = trunk - 3
    return left + right, right * 5


class Tagged(torch.nn.Module):
    """The program with tagged events."""

    def __init__(self, prefix: str = "") -> None:
        super().__init__()
        self.trunk = ops.npu_create_tagged_event(f"{prefix}trunk")
        self.left = ops.npu_create_tagged_event(f"{prefix}left")
        self.right = ops.npu_create_tagged_event(f"{prefix}right")

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Left on stream a, right on stream b."""
        trunk = x + 1
        ops.npu_tagged_event_record(self.trunk)
        with scope.npu_stream_switch("a"):
            ops.npu_tagged_event_wait(self.trunk)
            left = trunk * 2
            ops.npu_tagged_event_record(self.left)
        with scope.npu_stream_switch("b", -1):
            ops.npu_tagged_event_wait(self.trunk)
            right = trunk - 3
            ops.npu_tagged_event_record(self.right)
            last = right * 5
            ops.npu_record_tagged_stream(right, "b")
        ops.npu_tagged_event_wait(self.left)
        ops.npu_tagged_event_wait(self.right)
        return left + right, last


def native_events(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The program with streams and events that it makes itself."""
    a, b = torch.npu.Stream(), torch.npu.Stream()
    ready, done = torch.npu.Event(), torch.npu.Event()
    trunk = x + 1
    ready.record()
    with torch.npu.stream(a):
        ready.wait()
        left = trunk * 2
        done.record(a)
    b.wait_event(ready)
    with torch.npu.stream(b):
        right = trunk - 3
        right_done = b.record_event()
        last = right * 5
    trunk.record_stream(a)
    torch.npu.current_stream().wait_event(done)
    torch.npu.current_stream().wait_event(right_done)
    return left + right, last


def native_wait_stream(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The program with `wait_stream` between streams, the default one among them."""
    a, b = torch.Stream(device="npu"), torch.npu.Stream()
    trunk = x + 1
    a.wait_stream(torch.npu.default_stream())
    b.wait_stream(torch.npu.current_stream())
    with a:
        left = trunk * 2
    with torch.npu.stream(b):
        right = trunk - 3
    with torch.npu.stream(torch.npu.default_stream()):
        torch.npu.current_stream().wait_stream(a)
        torch.npu.default_stream().wait_stream(b)
        total = left + right
    with torch.npu.stream(b):
        last = right * 5
    return total, last


def inserting_pass(namespace: str) -> Callable[..., None]:
    """A custom pass that puts the branches of `plain` onto streams, with the operators of a namespace."""
    air = getattr(torch.ops, namespace)

    def insert(gm: fx.GraphModule, example_inputs: object, config: object) -> None:
        del example_inputs, config
        graph = gm.graph
        named = {node.target: node for node in graph.nodes if node.op == "call_function"}
        mul, mul_last = graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)
        sub = named[torch.ops.aten.sub.Tensor]
        total = graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)[1]
        with graph.inserting_before(mul):
            trunk_done = graph.call_function(air.record.default)
        for node, label in ((mul, "a"), (sub, "b"), (mul_last, "b")):
            with graph.inserting_before(node):
                graph.call_function(air.scope_enter.default, (["_user_stream_label"], [label]))
                if node is not mul_last:
                    graph.call_function(air.wait.default, ([trunk_done],))
            with graph.inserting_after(node):
                graph.call_function(air.scope_exit.default)
        with graph.inserting_before(total):
            graph.call_function(air.wait.default, ([mul, sub],))  # on tensors: their producers

    return insert


def stream_forms() -> Mapping[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """For each form, by name, the program and the options that it is compiled with."""
    return {
        "tagged events": (Tagged(), {}),
        "native events": (native_events, {}),
        "native wait_stream": (native_wait_stream, {}),
        "torch.ops.air": (plain, {"post_grad_custom_pre_pass": inserting_pass("air")}),
        "torch.ops.npugraph_ex": (plain, {"post_grad_custom_post_pass": inserting_pass("npugraph_ex")}),
    }


FORM_NAMES = ("tagged events", "native events", "native wait_stream", "torch.ops.air", "torch.ops.npugraph_ex")
