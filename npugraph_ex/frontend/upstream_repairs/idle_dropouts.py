"""Takes dropouts that draw nothing out of a Dynamo graph; AOT makes draws and copies of them.

In eager mode `dropout(x, p, training=False)`, and any dropout with ``p`` of 0 or of no elements, returns `x` itself. What is then
written in place is written into `x`; in AOT's graph it was written into a copy. With ``p`` of 1 eager mode multiplies by 0. AOT's
graph drew random numbers for that, and for no elements, and all later draws differed from those of eager mode.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from npugraph_ex.frontend.upstream_repairs.repair import Repair
from npugraph_ex.graph.nested_regions import all_graphs

REPAIR = Repair(
    fault="A dropout that draws nothing in eager mode copies its argument (in eval mode until torch 2.13), or draws.",
    threads=("pytorch#115249", "pytorch#195422"),
    test="tests/frontend/test_idle_dropouts.py",
)

_DROPOUTS = frozenset({F.dropout, torch.dropout, torch.dropout_, torch.ops.aten.dropout.default})


def take_out(gm: fx.GraphModule) -> None:
    """Replace each dropout that drops nothing by its argument, and one that drops all by a product, in all subgraphs too."""
    for graph in all_graphs(gm.graph):
        dropouts = [node for node in graph.nodes if node.op == "call_function" and node.target in _DROPOUTS]
        for node in dropouts:
            argument = _given(node, 0, "input")
            if _drops_nothing(node, argument):
                node.replace_all_uses_with(argument)
                graph.erase_node(node)
            elif not _in_place(node) and _is(_given(node, 1, "p"), 1):
                node.target, node.args, node.kwargs = torch.mul, (argument, 0.0), {}
        if dropouts and graph.owning_module is not None:
            graph.owning_module.recompile()


def _drops_nothing(node: fx.Node, argument: fx.Node) -> bool:
    value = argument.meta.get("example_value")
    empty = value is not None and any(isinstance(size, int) and size == 0 for size in value.shape)
    return empty or _given(node, 2, "training", "train") is False or _is(_given(node, 1, "p"), 0)


def _in_place(node: fx.Node) -> bool:
    """Whether it writes its argument, which AOT's graph does as eager mode."""
    return node.target is torch.dropout_ or bool(_given(node, 3, "inplace"))


def _is(probability: Any, number: int) -> bool:
    """Whether it is that number; a guard keeps the answer for one that the graph computes."""
    value = probability.meta.get("example_value") if isinstance(probability, fx.Node) else probability
    return value is not None and bool(value == number)


def _given(node: fx.Node, position: int, *names: str) -> Any:
    """An argument; None if the call leaves it to its default, under which a dropout drops."""
    named = [node.kwargs[name] for name in names if name in node.kwargs]
    return node.args[position] if position < len(node.args) else next(iter(named), None)
