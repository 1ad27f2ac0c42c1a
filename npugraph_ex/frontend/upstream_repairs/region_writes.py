"""Inlines nested compile regions that write an argument through ``out=``; AOT loses such writes.

Dynamo and AOT see a region's `x.add_(1)` and take `x` for written. For `torch.add(y, 1, out=x)` they do not: the region
computes with the new value, and the caller's tensor keeps the old one. So the calls of such regions are replaced by the
region's own calls before AOT traces the graph. This costs the time that the region would have saved.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from npugraph_ex.frontend.upstream_repairs.repair import Repair

REPAIR = Repair(
    fault="What a nested compile region writes into an argument through `out=` is lost.",
    torch=("2.13",),
    test="tests/passes/test_nested_regions.py",
)


def restore(gm: fx.GraphModule) -> None:
    """Inline the regions of a Dynamo graph that write through ``out=``, in place."""
    for call in gm.graph.find_nodes(op="call_function", target=torch.ops.higher_order.invoke_subgraph):
        region: Any = gm.get_submodule(str(call.args[0].target))
        restore(region)  # regions in regions
        if any(node.kwargs.get("out") is not None for node in region.graph.nodes):
            _inline(gm, call, region)
    gm.recompile()


def _inline(gm: fx.GraphModule, call: fx.Node, region: fx.GraphModule) -> None:
    twins: dict[fx.Node, Any] = dict(zip(region.graph.find_nodes(op="placeholder"), call.args[2:], strict=True))
    with gm.graph.inserting_before(call):
        for node in region.graph.find_nodes(op="get_attr"):  # subgraphs of other operators
            name = f"{call.args[0].target}_{node.target}"  # type: ignore[union-attr]
            setattr(gm, name, getattr(region, str(node.target)))
            twins[node] = gm.graph.get_attr(name)
        results: Any = gm.graph.graph_copy(region.graph, twins)
    for user in list(call.users):
        user.replace_all_uses_with(results[user.args[1]])
        gm.graph.erase_node(user)
    gm.graph.erase_node(call)
