"""Tells where AOT would return a written input in the place of another result, so that AOT writes inputs after the graph.

In `x.relu_(); return x * 2, count.add_(1)`, `x` needs gradients. AOT writes it after the graph, which returns the new `x` before
the results. `count` is written in the graph, and what `add_` gave back is `count` itself: AOT puts the input there, but counts
places without the new `x`. So `x * 2` is lost. Where no write stays in the graph, AOT puts no input among the results.
"""

from __future__ import annotations

import torch
from torch import fx

from npugraph_ex.graph.memory.aliases import output_values
from npugraph_ex.versions.repair import NOT_REPORTED, Repair

REPAIR = Repair(
    fault="A graph that is trained returns a written input twice, and loses another result, if it writes what needs gradients.",
    threads=NOT_REPORTED,
    test="tests/frontend/test_returned_inputs.py",
)


def may_lose_results(gm: fx.GraphModule) -> bool:
    """Whether AOT may lose a result of a Dynamo graph: one is an input itself, and inputs need gradients."""
    examples = [node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder")]
    if not _is_trained(gm.graph) or not any(getattr(example, "requires_grad", False) for example in examples):
        return False
    inputs = {id(example) for example in examples if isinstance(example, torch.Tensor)}
    results = [value for value in output_values(gm.graph) if isinstance(value, fx.Node)]
    return any(id(value.meta.get("example_value")) in inputs for value in results)


def _is_trained(graph: fx.Graph) -> bool:
    switches = [node for node in graph.nodes if getattr(node.target, "__name__", "") == "_set_grad_enabled"]
    return torch.is_grad_enabled() or any(switch.args[0] for switch in switches)
