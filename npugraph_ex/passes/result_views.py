"""Keeps results that were no views from becoming views: a pass that replaces new memory by a view changes autograd's answer.

`detach_()` refuses a view, and a view shares its version with its base. The bytes are the same in both cases. So this pass
puts `detach` before such a result, which makes a tensor of its own in the same memory and starts no work.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from npugraph_ex.graph.memory.aliases import is_view, output_values
from npugraph_ex.graph.metadata import derive, fake_mode_of
from npugraph_ex.graph.operators import returned_argument
from npugraph_ex.passes.base import PassContext

_detach = torch.ops.aten.detach.default


def kinds(graph: fx.Graph) -> tuple[bool, ...]:
    """For each result, whether it is a view to autograd."""
    return tuple(isinstance(value, fx.Node) and _is_view(value) for value in output_values(graph))


def run(gm: fx.GraphModule, context: PassContext) -> None:
    """The pass."""
    graph = gm.graph
    output = graph.output_node()
    results: list[Any] = output_values(graph)
    own: dict[fx.Node, fx.Node] = {}
    for at, (value, before) in enumerate(zip(results, context.result_views, strict=True)):
        if not isinstance(value, fx.Node) or before or not _is_view(value):
            continue
        if value not in own:
            with graph.inserting_before(output):
                own[value] = graph.call_function(_detach, (value,))
            own[value].meta = {key: said for key, said in value.meta.items() if key not in {"val", "tensor_meta"}}
            own[value].meta["val"] = derive(own[value], fake_mode_of(graph))
        results[at] = own[value]
    if own:
        output.args = (results if isinstance(output.args[0], list) else tuple(results),)


def _is_view(node: fx.Node) -> bool:
    """Whether the tensor that a node returns is a view of another tensor to autograd."""
    while True:
        given = node.args[0] if node.target is operator.getitem else returned_argument(node)
        if not isinstance(given, fx.Node):
            return node.op == "call_function" and node.target is not _detach and is_view(node)
        node = given
