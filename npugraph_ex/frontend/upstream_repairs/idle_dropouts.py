"""Takes dropouts that drop nothing out of a Dynamo graph; AOT makes them copies of their argument.

In eager mode `dropout(x, p, training=False)`, and any dropout with ``p`` of 0, returns `x` itself. What is then written in place is
written into `x`; in AOT's graph it was written into a copy.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from npugraph_ex.frontend.upstream_repairs.repair import Repair
from npugraph_ex.graph.nested_regions import all_graphs

REPAIR = Repair(
    fault="What is written into the result of a dropout in eval mode is not written into its argument.",
    torch=("2.13",),
    mended=(2, 14),
    test="tests/frontend/test_idle_dropouts.py",
)

_DROPOUTS = frozenset({F.dropout, torch.dropout, torch.dropout_, torch.ops.aten.dropout.default})


def take_out(gm: fx.GraphModule) -> None:
    """Replace each dropout that drops nothing by its argument, in the graph and its subgraphs."""
    for graph in all_graphs(gm.graph):
        idle = [
            node for node in graph.nodes if node.op == "call_function" and node.target in _DROPOUTS and _is_idle(node)
        ]
        for node in idle:
            node.replace_all_uses_with(_given(node, 0, "input"))
            graph.erase_node(node)
        if idle and graph.owning_module is not None:
            graph.owning_module.recompile()


def _is_idle(node: fx.Node) -> bool:
    probability, training = _given(node, 1, "p"), _given(node, 2, "training", "train")
    return training is False or (isinstance(probability, (int, float)) and probability == 0)


def _given(node: fx.Node, position: int, *names: str) -> Any:
    """An argument; None if the call leaves it to its default, under which a dropout drops."""
    named = [node.kwargs[name] for name in names if name in node.kwargs]
    return node.args[position] if position < len(node.args) else next(iter(named), None)
