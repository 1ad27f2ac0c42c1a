"""Keeps results that were no views from becoming views: a pass that replaces new memory by a view changes autograd's answer.

`detach_()` refuses a view, and a view shares its version with its base. The bytes are the same in both cases. So this pass
puts `detach` behind such a result, which makes a tensor of its own in the same memory and starts no work. The views that the
graph makes of the result are then views of that tensor, as in the program.

AOT makes views, too: in `y = x + 1; y.view(-1)[1:].mul_(2)` its new value of `y` is a view of the one that was flat. `NO_VIEWS` in
the metadata of the graph's output names results that are no views in the program.
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
NO_VIEWS = "results_that_are_no_views"
"""The metadata of a graph's output that has the positions of these results, where the program is known."""


def kinds(graph: fx.Graph) -> tuple[bool, ...]:
    """For each result, whether it is a view to autograd."""
    none = graph.output_node().meta.get(NO_VIEWS, ())
    values = enumerate(output_values(graph))
    return tuple(isinstance(value, fx.Node) and at not in none and _is_view(value) for at, value in values)


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
            views = [user for user in value.users if user.op == "call_function" and is_view(user)]
            with graph.inserting_after(value):
                own[value] = graph.call_function(_detach, (value,))
            for view in views:
                view.replace_input_with(value, own[value])
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
