"""Finds programs that write an argument and change its own strides in place, under another name (`y = x.to(x.dtype); y.t_()`).

AOT gives such an argument the strides and the offset of a result that lies in memory of its own, and then copies the result into
it: an argument that begins elsewhere in its storage, or has gaps, is written in a wrong place. Where sizes change, too, AOT fails.
Dynamo changes the strides after the graph where the program uses the argument's own name. Such a program runs operator by operator.
"""

from __future__ import annotations

import torch
from torch import fx

from npugraph_ex import _torch_private
from npugraph_ex.frontend.upstream_repairs.layouts import may_write, name_of_call
from npugraph_ex.versions.repair import NOT_REPORTED, Repair

REPAIR = Repair(
    fault="An argument that is written, and turned in place under another name, is written at the start of its storage.",
    threads=NOT_REPORTED,
    test="tests/frontend/test_turned_arguments.py",
)

_TURNS = frozenset(
    {"t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_", "as_strided_", "resize_", "resize_as_"}
)


def lost_write(gm: fx.GraphModule) -> str:
    """Why AOT would write an argument of a Dynamo graph in a wrong place; empty if it would not."""
    turned = {_tensor(node.all_input_nodes[0]) for node in gm.graph.nodes if _turns(node)} - {None}
    arguments = {
        node: name
        for node, name in zip(gm.graph.find_nodes(op="placeholder"), _torch_private.dynamo_input_names(gm), strict=True)
        if _tensor(node) in turned
    }
    parts = dict.fromkeys(arguments)  # and whatever may be a part of one
    for node in gm.graph.nodes if arguments else ():
        if parts.keys().isdisjoint(node.all_input_nodes):
            continue
        parts[node] = None
        if may_write(node) and not _turns(node):
            names = ", ".join(arguments.values())
            return f"it writes {names} and changes its strides in place, under another name, which torch does in the wrong place"
    return ""


def _tensor(node: fx.Node) -> int | None:
    """The identity of a value: Dynamo has one tensor for all names of it."""
    value = node.meta.get("example_value")
    return id(value) if isinstance(value, torch.Tensor) else None


def _turns(node: fx.Node) -> bool:
    name = name_of_call(node)
    return name.partition(".")[0] in _TURNS and bool(node.all_input_nodes)
