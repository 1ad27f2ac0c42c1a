"""Graphs that depend on the current device: `torch.arange(4, device="npu")` depends on it at each call.

Passes and capture assume the device of the compilation. So such a graph gets a Dynamo guard on the current device, and Dynamo
compiles it once for each device. Without Dynamo, or if its guards are filtered out, a call under another device runs the
graph from before the passes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from npugraph_ex import _torch_private
from npugraph_ex.aclgraph import scopes
from npugraph_ex.graph.nested_regions import all_graphs
from npugraph_ex.observe.logger import logger

_MOVES = ("npu", "cuda")
"""Methods of a tensor that use the current device by default; torch_npu makes the second an alias of the first."""


def is_asked_for(graph: fx.Graph) -> bool:
    """Whether a Dynamo or AOT graph names the device type without an index and there are several devices."""
    return torch.npu.device_count() > 1 and any(map(_means_current_device, graph.nodes))


def decides(graph: fx.Graph) -> bool:
    """Whether the results of a Dynamo or AOT graph depend on the current device, however many devices there are."""
    nodes = (node for part in all_graphs(graph) for node in part.nodes)
    return any(map(_means_current_device, nodes)) or torch.get_default_device().type == "npu"


def _means_current_device(node: fx.Node) -> bool:
    if node.op == "call_method" and node.target in _MOVES:
        return True
    return any(
        value in _MOVES if isinstance(value, str) else isinstance(value, torch.device) and value == torch.device("npu")
        for value in pytree.tree_leaves((node.args, node.kwargs))
    )


def guard(gm: fx.GraphModule) -> None:
    """Make Dynamo compile the function again for another current device, if its graph may depend on it."""
    if torch.npu.device_count() > 1 and decides(gm.graph):
        _torch_private.guard_on_result("npu", "current_device")
        _torch_private.forget_fake_results()


class AnyDevice:
    """A compiled graph that may be called under another current device than at its compilation.

    Args:
        gm: the graph before the passes, which depends on the current device.
        number: the graph's number in `report.graphs`.
    """

    def __init__(self, gm: fx.GraphModule, number: int) -> None:
        self._as_given = scopes.around(gm)(fx.GraphModule(gm, copy.deepcopy(gm.graph)).forward)
        self._number = number
        self._device = traced_on(gm.graph)
        self._warned = False

    def around(self, compiled: Callable[..., Sequence[Any]]) -> Callable[..., Sequence[Any]]:
        """A function that runs the compiled graph on its own device, and the original graph on other devices."""

        def run(*inputs: Any) -> Sequence[Any]:
            device = torch.npu.current_device()
            if device == self._device:
                return compiled(*inputs)
            if not self._warned:
                self._warned = True
                logger.warning(
                    "Graph %d makes tensors on the current device and was compiled for device %d; now it is %d. Such calls run "
                    "operator by operator. Compile it with torch.compile, which compiles it for each device, or name the device "
                    "of each tensor, as in device='npu:%d'",
                    self._number,
                    self._device,
                    device,
                    self._device,
                )
            return self._as_given(*inputs)

        run.__wrapped__ = compiled  # for callers who check the current device themselves
        return run


def traced_on(graph: fx.Graph) -> int:
    """The current device at the graph's trace."""
    values = [node.meta.get("val") for node in graph.nodes if _means_current_device(node)]
    devices = [value.device for value in values if isinstance(value, torch.Tensor) and value.device.type == "npu"]
    return next((device.index for device in devices if device.index is not None), int(torch.npu.current_device()))


def follow(gm: fx.GraphModule, number: int) -> AnyDevice | None:
    """Prepare for calls under other devices, before the passes; None if the current device does not matter."""
    return AnyDevice(gm, number) if is_asked_for(gm.graph) else None
