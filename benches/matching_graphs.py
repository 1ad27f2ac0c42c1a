"""Graphs for the benchmark of matching: decoder-like layers, built node by node so that 16,000 nodes take no time."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

HIDDEN = 128
ROWS = 4
NODES_A_LAYER = 16


class Builder:
    """A graph in the making."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.mode = FakeTensorMode()

    def placeholder(self, *shape: int, dtype: torch.dtype = torch.float16) -> fx.Node:
        """Add an input."""
        node = self.graph.placeholder(f"input_{len(self.graph.nodes)}")
        with self.mode:
            node.meta["val"] = torch.empty(shape, dtype=dtype, device="npu")
        return node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Add a call, with its fake result."""
        node = self.graph.call_function(target, args, kwargs)
        values, options = fx.map_arg((args, kwargs), lambda source: source.meta["val"])
        if target is operator.getitem:
            node.meta["val"] = values[0][values[1]]
        else:
            # Fresh storages, or every layer would seem to share memory with every other.
            with self.mode:
                node.meta["val"] = target(*values, **options)
        return node


def layers(nodes: int, *, fusing: bool = True) -> fx.GraphModule:
    """A graph of about ``nodes`` nodes in which half of the norms fuse with a quantisation, and half are near-misses.

    Without ``fusing`` every quantisation is one step away from its norm, and no rule matches anywhere.
    """
    aten, npu = torch.ops.aten, torch.ops.npu
    build = Builder()
    x, gamma = build.placeholder(ROWS, HIDDEN), build.placeholder(HIDDEN)
    residual = x
    kept = []
    for number in range(nodes // NODES_A_LAYER):
        norm = build.call(npu.npu_add_rms_norm.default, x, residual, gamma, 1e-5)
        y, residual = (build.call(operator.getitem, norm, position) for position in (0, 2))
        quant = build.call(npu.npu_dynamic_quant.default, y if fusing else build.call(aten.abs.default, y))
        quantised, scale = (build.call(operator.getitem, quant, position) for position in (0, 1))
        wide = build.call(aten._to_copy.default, quantised, dtype=torch.float16)
        column = build.call(aten.unsqueeze.default, scale, -1)
        narrow = build.call(aten._to_copy.default, column, dtype=torch.float16)
        product = build.call(aten.mul.Tensor, wide, narrow)
        gate = build.call(aten.sigmoid.default, product)
        gated = build.call(aten.mul.Tensor, product, gate)
        shifted = build.call(aten.add.Tensor, gated, 1)
        scaled = build.call(aten.mul.Tensor, shifted, 0.5)
        x = build.call(aten.relu.default, scaled)
        if number % 2:
            kept.append(build.call(aten.neg.default, y))
    build.graph.output((x, residual, *kept))
    return fx.GraphModule(torch.nn.Module(), build.graph)
