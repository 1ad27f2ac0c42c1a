"""The subgraph that a proposal is about: its nodes, which of them vanish, and a copy of it that runs by itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import fx

from npugraph_ex.graph.effects import draws_random_numbers, has_effect
from npugraph_ex.graph.memory.aliases import tensor_leaves
from npugraph_ex.lifting.proposal import Proposal
from npugraph_ex.lifting.trials import uniform


@dataclass(frozen=True)
class Subgraph:
    """The nodes between the inputs and the outputs of a proposal.

    Attributes:
        inputs: the proposal's, then numbers such as symbolic sizes, and constants of equal elements.
        nodes: all that the outputs are computed by, in graph order.
        vanishing: those of them that nobody else uses.
        outputs: the proposal's.
    """

    inputs: tuple[fx.Node, ...]
    nodes: tuple[fx.Node, ...]
    vanishing: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]

    @classmethod
    def of(cls, proposal: Proposal) -> Subgraph | str:
        """The subgraph; a reason where the outputs depend on something else than the inputs."""
        inside: set[fx.Node] = set()
        numbers: dict[fx.Node, None] = {}
        waiting = list(proposal.outputs)
        while waiting:
            node = waiting.pop()
            if node in inside or node in proposal.inputs:
                continue
            if not tensor_leaves(node) or uniform(node) is not None:
                numbers[node] = None
            elif node.op != "call_function":
                return f"it also reads {node.name}"
            elif has_effect(node) or draws_random_numbers(node):
                return f"{node.name} does more than compute its result"
            else:
                inside.add(node)
                waiting.extend(node.all_input_nodes)
        nodes = tuple(sorted(inside))
        return cls((*proposal.inputs, *numbers), nodes, _vanishing(nodes, proposal.outputs), proposal.outputs)

    def alone(self, size: Callable[[Any], Any], *further: fx.Node) -> fx.Graph:
        """A copy whose placeholders are the inputs, and that gives the values of ``further``, too.

        ``size`` translates the sizes that are written in its views.
        """
        graph = fx.Graph()
        twins = {node: graph.placeholder(f"input_{position}") for position, node in enumerate(self.inputs)}
        for node in self.nodes:
            args, kwargs = fx.map_arg((node.args, node.kwargs), twins.__getitem__)
            target: Any = _AS_JUDGED.get(node.target, node.target)
            twins[node] = graph.call_function(target, _translated(node, args, size), kwargs)
        graph.output(tuple(twins[node] for node in (*self.outputs, *further)))
        return graph


def sized(graph: fx.Graph, size: Callable[[Any], Any]) -> fx.Graph:
    """A copy of a replacement; ``size`` translates the sizes that are written in its views."""
    copy, twins = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        twins[node] = copy.node_copy(node, twins.__getitem__)
        twins[node].target = _AS_JUDGED.get(node.target, node.target)
        twins[node].args = _translated(node, twins[node].args, size)
    return copy


def _vanishing(nodes: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> tuple[fx.Node, ...]:
    """The outputs, and what is used by these only."""
    found = set(outputs)
    for node in reversed(nodes):
        if all(user in found or (user.target is getitem and not user.users) for user in node.users):
            found.add(node)
    return tuple(sorted(found))


SIZED = {
    **dict.fromkeys(
        (
            torch.ops.aten.view.default,
            torch.ops.aten.reshape.default,
            torch.ops.aten._unsafe_view.default,  # noqa: SLF001 - the operator's name
            torch.ops.aten.expand.default,
            torch.ops.aten.split_with_sizes.default,
        ),
        1,
    ),
    **dict.fromkeys((torch.ops.aten.ones.default, torch.ops.aten.zeros.default, torch.ops.aten.full.default), 0),
}
"""Operators whose argument of this number holds sizes."""


def _group_norm(x: torch.Tensor, *operands: Any) -> tuple[torch.Tensor, ...]:
    """`native_group_norm` with the sizes of ``x`` in the place of those that were written down."""
    weight, bias, *_, group, epsilon = operands
    sizes = (*x.shape[:2], math.prod(x.shape[2:]))
    return torch.ops.aten.native_group_norm.default(x, weight, bias, *sizes, group, epsilon)  # type: ignore[no-any-return]


def _topk(x: torch.Tensor, k: int, dim: int = -1, largest: bool = True, *_: Any) -> tuple[torch.Tensor, ...]:  # noqa: FBT001, FBT002 - its schema
    """`topk` with the largest first: of the orders that ``sorted=False`` allows, the one that operators give."""
    return torch.ops.aten.topk.default(x, k, dim, largest)  # type: ignore[no-any-return]


def _out_dtype(_: Any, dtype: torch.dtype, *operands: torch.Tensor) -> torch.Tensor:
    """`out_dtype`, which a backend takes apart, of a product."""
    left, right = (one.to(dtype) for one in operands)
    return left @ right


_AS_JUDGED: dict[Any, Any] = {
    torch.ops.higher_order.out_dtype: _out_dtype,
    torch.ops.aten.native_group_norm.default: _group_norm, torch.ops.aten.topk.default: _topk,
}  # fmt: skip
"""What a copy calls in the place of an operator."""


def _translated(node: fx.Node, args: tuple[Any, ...], size: Callable[[Any], Any]) -> tuple[Any, ...]:
    at = SIZED.get(node.target)  # type: ignore[call-overload]  # a target of another kind is no key
    if at is None:
        return args
    return (*args[:at], [one if isinstance(one, fx.Node) else size(one) for one in args[at]], *args[at + 1 :])
