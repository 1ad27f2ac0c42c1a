"""Splits a graph that is trained so that each collective and each unused random draw runs once, in the half in which it was traced.

The other ranks take part in a collective, and would wait for ever if it were left out or met twice. torch's `default_partition`
drops unused calls of torch.distributed by name, whatever is registered about them. It copies into the backward what the
backward can compute from saved values, if something impure depends on it: collectives with several results, whose waits are impure.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from functorch.compile import default_partition
from torch import fx

from npugraph_ex import _torch_private
from npugraph_ex.graph.collectives import is_collective, is_wait
from npugraph_ex.graph.effects import draws_random_numbers
from npugraph_ex.versions.repair import Repair

REPAIR = Repair(
    fault="A graph that is trained loses unused collectives and random draws, or has a collective in both halves.",
    threads=("pytorch#150302",),
    test="tests/frontend/test_unused_draws.py",
)

_OPERATOR = "unused"


def split(gm: fx.GraphModule, inputs: Sequence[Any], **how: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split a joint graph as AOT's own partitioner does, with each collective and each unused draw in one half.

    A used collective that the user's checkpointing computes again is left to AOT.

    Args:
        gm: AOT's joint graph of forward and backward; edited.
        inputs: its inputs.
        how: the other arguments of the partitioner.
    """
    collectives = [node for node in gm.graph.nodes if is_collective(node)]
    drawing = [node for node in gm.graph.nodes if draws_random_numbers(node)]
    unused = [node for node in [*collectives, *drawing] if all(_is_dropped(user) for user in node.users)]
    _torch_private.keep_where_traced(
        gm.graph, [*unused, *(node for node in collectives if not _torch_private.is_recomputed(node))]
    )
    for node in unused:
        _hide(node)
    halves: tuple[fx.GraphModule, fx.GraphModule] = default_partition(gm, inputs, **how)
    for half in halves:
        for node in half.graph.find_nodes(op="call_function", target=held):
            node.target = node.meta.pop(_OPERATOR)
        half.recompile()
    return halves


def held(*_: Any, **__: Any) -> None:
    """Stands in a graph for an unused call; never called."""
    raise AssertionError("this function only marks a place in a graph")


fx.has_side_effect(held)  # for good: no other graph has this function


def _is_dropped(user: fx.Node) -> bool:
    """Whether a user of a call only takes a part of the result or waits, and nobody uses that."""
    return (is_wait(user) or user.target is operator.getitem) and all(_is_dropped(next_) for next_ in user.users)


def _hide(node: fx.Node) -> None:
    """Put the mark in the place of an unused call."""
    for user in reversed(_users(node)):
        node.graph.erase_node(user)
    node.meta[_OPERATOR] = node.target
    node.target = held


def _users(node: fx.Node) -> list[fx.Node]:
    """All that depends on a node, in graph order."""
    found: dict[fx.Node, None] = {}
    for user in node.users:
        found.update(dict.fromkeys([user, *_users(user)]))
    return sorted(found)
