"""Gives reflecting and replicating pads the strides of the device, contiguous ones; torch's meta functions keep channels_last.

`pad(x, (1, 1, 1, 1), mode="reflect").reshape(-1)` is a view on the device and was a copy in AOT's graph, so a write into it
went elsewhere. A pad of a batch of images is followed by `contiguous()`: it is a copy where the trace sees other strides.
"""

from __future__ import annotations

import torch
from torch import fx

from npugraph_ex.frontend.upstream_repairs.repair import Repair
from npugraph_ex.graph.nested_regions import all_graphs

REPAIR = Repair(
    fault="Reflecting and replicating pads have the strides of torch's CPU kernels in a trace, and others on the device.",
    threads=("pytorch#179366", "pytorch#179837"),
    torch=("2.13", "2.14"),
    test="tests/frontend/test_pads.py",
)

_PADS = frozenset({"pad", "reflection_pad2d", "replication_pad2d"})


def make_contiguous(gm: fx.GraphModule) -> None:
    """Add `contiguous()` behind each such pad in the graph and its subgraphs."""
    for graph in all_graphs(gm.graph):
        pads = [node for node in graph.nodes if node.op == "call_function" and _keeps_strides(node)]
        for node in pads:
            with graph.inserting_after(node):
                made = graph.call_method("contiguous", (node,))
            made.meta = dict(node.meta)
            node.replace_all_uses_with(made, delete_user_cb=lambda user, made=made: user is not made)
        if pads and graph.owning_module is not None:
            graph.owning_module.recompile()


def _keeps_strides(node: fx.Node) -> bool:
    value = node.meta.get("example_value")
    if not isinstance(value, torch.Tensor) or value.device.type != "npu" or value.dim() != 4:
        return False
    name = str(getattr(node.target, "__name__", "")).partition(".")[0]
    mode = node.args[2] if len(node.args) > 2 else node.kwargs.get("mode", "constant")
    return name in _PADS and (name != "pad" or mode in {"reflect", "replicate"})
