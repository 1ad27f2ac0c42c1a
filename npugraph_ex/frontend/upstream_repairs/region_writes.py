"""Inlines nested compile regions that write an argument through ``out=`` or use `as_strided`, and those in regions.

Dynamo and AOT see a region's `x.add_(1)` and take `x` for written. For `torch.add(y, 1, out=x)` they do not: the region
computes with the new value, and the caller's tensor keeps the old one. So the calls of such regions are replaced by the
region's own calls before AOT traces the graph. This costs the time that the region would have saved. `as_strided_writes`, which
finds writes through `as_strided`, sees a graph without regions.

Nor do they see what a region writes that another region calls. Of some such calls AOT loses the subgraph, and raises. So a region
that is left calls no other; AOT still traces it once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from npugraph_ex.versions.repair import NOT_REPORTED, Repair

REPAIR = Repair(
    fault="What a nested compile region writes by `out=` or a region in it is lost; through `as_strided`, it goes elsewhere.",
    threads=NOT_REPORTED,
    test="tests/passes/test_nested_regions.py",
)


def restore(gm: fx.GraphModule, *, is_region: bool = False) -> None:
    """Inline the regions of a Dynamo graph that write through ``out=`` or use `as_strided`, in place; all that a region calls."""
    calls = gm.graph.find_nodes(op="call_function", target=torch.ops.higher_order.invoke_subgraph)
    regions: dict[str, Any] = {name: gm.get_submodule(name) for name in dict.fromkeys(map(_name, calls))}
    for region in regions.values():
        restore(region, is_region=True)
    writing = {name for name, region in regions.items() if is_region or any(map(_writes, region.graph.nodes))}
    for call in calls:
        if _name(call) in writing:
            _inline(gm, call, regions[_name(call)])
    if writing:
        gm.recompile()


def _name(call: fx.Node) -> str:
    return str(call.args[0].target)  # type: ignore[union-attr]


def _writes(node: fx.Node) -> bool:
    return node.kwargs.get("out") is not None or "as_strided" in str(node.target)


def _inline(gm: fx.GraphModule, call: fx.Node, region: fx.GraphModule) -> None:
    twins: dict[fx.Node, Any] = dict(zip(region.graph.find_nodes(op="placeholder"), call.args[2:], strict=True))
    with gm.graph.inserting_before(call):
        for node in region.graph.find_nodes(op="get_attr"):  # subgraphs of other operators
            name = f"{_name(call)}_{node.target}"
            setattr(gm, name, getattr(region, str(node.target)))
            twins[node] = gm.graph.get_attr(name)
        results: Any = gm.graph.graph_copy(region.graph, twins)
    for user in list(call.users):
        user.replace_all_uses_with(results[user.args[1]])
        gm.graph.erase_node(user)
    gm.graph.erase_node(call)
