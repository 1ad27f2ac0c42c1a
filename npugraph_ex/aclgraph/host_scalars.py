"""Scalars in CPU tensors that the host knows at each call. A capture fixes their values, so the values are part of the graph key.

Dynamo passes a float that it does not specialise, such as an attribute of a module under `dynamic=True`, as a CPU tensor
without dimensions. It also computes with floats in such tensors: `F.interpolate` with a factor divides sizes in them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx

from npugraph_ex.graph.memory.aliases import AliasFacts, tensor_leaves, written_by

_aten = torch.ops.aten
_COPIES = (_aten._to_copy.default, _aten.copy.default, _aten.copy_.default)  # noqa: SLF001 - the operator's name


def host_scalars(graph: fx.Graph) -> frozenset[fx.Node]:
    """The placeholders of such scalars, constants, and the nodes that the host computes from these and from sizes alone.

    Without those that the graph returns, because a result must not be a constant of the capture, and those that the device
    writes.
    """
    scalars = [node for node in graph.nodes if _is_scalar(node)]
    if not scalars:
        return frozenset()
    facts = AliasFacts(graph)
    found = _known(scalars, facts)
    others = [written_by(node) for node in facts.writers if node not in found]
    leaving = {*graph.output_node().all_input_nodes}.union(*others)
    return frozenset(_known([node for node in scalars if node not in leaving], facts))


def _known(scalars: Sequence[fx.Node], facts: AliasFacts) -> set[fx.Node]:
    found: set[fx.Node] = set()
    for node in scalars:
        if _is_known(node, found, facts):
            found.add(node)
    return found


def _is_scalar(node: fx.Node) -> bool:
    leaves = list(tensor_leaves(node))
    return bool(leaves) and all(leaf.device.type == "cpu" and leaf.dim() == 0 for leaf in leaves)


def _is_known(node: fx.Node, found: Collection[fx.Node], facts: AliasFacts) -> bool:
    """Whether the graph key decides the value of ``node``; in-place operators of torch on such values are computed anew, too."""
    if any(user.target in _COPIES and not _is_scalar(user) for user in node.users):
        return False  # a copy to the device makes the host wait, which a capture forbids
    if node.op in ("placeholder", "get_attr"):
        return not facts.is_written(node)
    if node.op != "call_function" or torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        return False  # `rand_like(scalar)` returns a new number at each call
    if node.is_impure() and getattr(node.target, "namespace", "") != "aten":
        return False
    return all(source in found or _is_number(source) for source in node.all_input_nodes)


def _is_number(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool, int, float))


def values(inputs: Sequence[Any], positions: Sequence[int]) -> tuple[str, ...]:
    """Keys of the scalars at ``positions``. Equal keys mean equal values: -0.0 differs from 0.0, and NaN equals NaN."""
    return tuple([repr(inputs[position].item()) for position in positions])
