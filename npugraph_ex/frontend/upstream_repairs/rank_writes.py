"""Writes what `torch.linalg.matrix_rank` computes into its ``out``; traced, torch's own function binds it to a name instead.

``matrix_rank_impl`` in C++ computes into ``out`` in eager mode alone. Under a trace it assigns a new tensor to its reference,
so a compiled program read the old contents. So the call without ``out`` is followed by a copy. ``out`` has the right shape:
Dynamo traces no call that resizes it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from npugraph_ex.graph.nested_regions import all_graphs
from npugraph_ex.versions.repair import NOT_REPORTED, Repair

REPAIR = Repair(
    fault="`torch.linalg.matrix_rank` with `out` writes nothing.",
    threads=NOT_REPORTED,
    test="tests/frontend/test_rank_writes.py",
)

_FUNCTIONS = (torch.linalg.matrix_rank, torch.ops.aten.linalg_matrix_rank)


def copy(gm: fx.GraphModule) -> None:
    """Make each such call of a Dynamo graph and its subgraphs a call and a copy, in place."""
    for graph in all_graphs(gm.graph):
        writing = [node for node in graph.nodes if _is_lost(node)]
        for node in writing:
            out = node.kwargs["out"]
            node.target = _function(node)
            node.kwargs = {name: value for name, value in node.kwargs.items() if name != "out"}
            node.replace_all_uses_with(out)
            with graph.inserting_after(node):
                graph.call_method("copy_", (out, node)).meta = {**node.meta, "example_value": out.meta["example_value"]}
        if writing and graph.owning_module is not None:
            graph.owning_module.recompile()


def _is_lost(node: fx.Node) -> bool:
    return _function(node) in _FUNCTIONS and isinstance(node.kwargs.get("out"), fx.Node)


def _function(node: fx.Node) -> Any:
    """What the node calls; of an operator the one with all overloads, because each `out` has its own."""
    return getattr(node.target, "overloadpacket", node.target)
