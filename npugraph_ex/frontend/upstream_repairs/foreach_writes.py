"""Splits in-place `torch._foreach_*_` calls whose members overlap; AOT computes all members from their values before the call.

In eager mode `torch._foreach_add_([x[:4], x[2:6]], 1)` adds one after the other, so `x[2:4]` grows by 2. In AOT's graph the
members were computed at once, and the last one that was written back won. Calls whose members do not overlap stay whole.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from itertools import permutations
from typing import Any

import torch
from torch import fx

from npugraph_ex import _torch_private
from npugraph_ex.graph.memory.regions import Region
from npugraph_ex.graph.nested_regions import all_graphs
from npugraph_ex.versions.repair import NOT_REPORTED, Repair

REPAIR = Repair(
    fault="An in-place `torch._foreach_*_` whose tensors overlap writes other values.",
    threads=NOT_REPORTED,
    test="tests/frontend/test_foreach_writes.py",
)


def split(gm: fx.GraphModule) -> None:
    """Make each such call of a Dynamo graph and its subgraphs one call a member, in place."""
    for graph in all_graphs(gm.graph):
        mixed = [node for node in graph.nodes if _writes_each(node) and _overlap(node)]
        for node in mixed:
            _split(node)
        if mixed and graph.owning_module is not None:
            graph.owning_module.recompile()


def _writes_each(node: fx.Node) -> bool:
    name = str(getattr(node.target, "__name__", "")).partition(".")[0]
    return node.op == "call_function" and name.startswith("_foreach_") and name.endswith("_") and bool(node.args)


def _overlap(node: fx.Node) -> bool:
    """Whether a member that is written shares memory with a tensor of another one."""
    members = list(_members(node))
    regions = [[_region(one) for one in member if isinstance(one, fx.Node)] for member in members]
    return any(mine[0].overlaps(other) for mine, others in permutations(regions, 2) for other in others)


def _members(node: fx.Node) -> Iterator[tuple[Any, ...]]:
    """The arguments of the call for each member: of a list, the member's own; anything else as it is."""
    written: Sequence[fx.Node] = node.args[0]  # type: ignore[assignment]
    for place in range(len(written)):
        yield tuple(one[place] if isinstance(one, (list, tuple)) else one for one in node.args)


def _region(node: fx.Node) -> Region:
    value: torch.Tensor = node.meta["example_value"]
    return Region.from_tensor(value, _torch_private.storage_key(value))


def _split(node: fx.Node) -> None:
    written: Sequence[fx.Node] = node.args[0]  # type: ignore[assignment]
    for place, member in enumerate(_members(node)):
        args = [
            [one] if isinstance(whole, (list, tuple)) else one for one, whole in zip(member, node.args, strict=True)
        ]
        kwargs = {name: [one[place]] if isinstance(one, (list, tuple)) else one for name, one in node.kwargs.items()}
        with node.graph.inserting_before(node):
            made = node.graph.call_function(node.target, tuple(args), kwargs)  # type: ignore[arg-type]
        made.meta = {key: value for key, value in node.meta.items() if key != "example_value"}
    for user in list(node.users):
        if user.target is operator.getitem:
            user.replace_all_uses_with(written[user.args[1]])  # type: ignore[index]
            node.graph.erase_node(user)
    node.graph.erase_node(node)
