"""The calls whose host arguments replays update, and the inputs that therefore need no new capture.

These are facts of the graph; the module `updates` performs the updates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx.experimental.symbolic_shapes import free_symbols
from torch.utils import _pytree as pytree

from npugraph_ex.aclgraph.host_arguments import registered
from npugraph_ex.graph.memory.aliases import named_arguments, tensor_leaves


@dataclass(frozen=True)
class UpdatePlan:
    """The host arguments of one graph that replays update.

    Attributes:
        calls: each call that takes such arguments, with the names of those that vary.
        hosts: the numbers and CPU tensors on which only these arguments depend.
        positions: the inputs among them, which are no part of a graph key.
        values: a function of the graph's inputs; it returns the arguments of each call by name, in the order of ``calls``.
    """

    calls: dict[fx.Node, tuple[str, ...]]
    hosts: frozenset[fx.Node]
    positions: frozenset[int]
    values: Callable[..., list[dict[str, Any]]]

    @classmethod
    def from_graph(cls, gm: fx.GraphModule) -> UpdatePlan | None:
        """The plan for a graph after all passes; None if replays can update nothing."""
        calls = {node: names for node in gm.graph.nodes if (names := _varying(node))}
        if not calls:
            return None
        hosts = _used_by_updates_alone(gm.graph, calls)
        placeholders = gm.graph.find_nodes(op="placeholder")
        positions = frozenset(position for position, node in enumerate(placeholders) if node in hosts)
        # If other kernels use every number too, a new number needs a new capture in any case.
        return cls(calls, hosts, positions, _evaluator(gm, calls)) if positions else None


def _is_host_value(node: fx.Node) -> bool:
    """Whether ``node`` is a number, or a tensor on the CPU."""
    value = node.meta.get("val")
    return isinstance(value, torch.SymInt) or (isinstance(value, torch.Tensor) and value.device.type == "cpu")


def _varying(node: fx.Node) -> tuple[str, ...]:
    """The names of the registered arguments of ``node`` that differ from call to call."""
    entry = registered(node.target)
    if entry is None:
        return ()
    given = _given(node)
    return tuple(name for name in entry.names if any(map(_is_host_value, _nodes(given.get(name)))))


def _given(call: fx.Node) -> dict[str, Any]:
    """The arguments of a call by the names of its schema."""
    return named_arguments(call.target, call.args, call.kwargs) if isinstance(call.target, OpOverload) else {}


def _nodes(value: object) -> Iterator[fx.Node]:
    return (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, fx.Node))


def _used_by_updates_alone(graph: fx.Graph, calls: dict[fx.Node, tuple[str, ...]]) -> frozenset[fx.Node]:
    """Host values that only updated arguments use, and whose symbols are in no tensor's shape."""
    baked = shape_symbols(graph)
    hosts: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if not _is_host_value(node) or not node.users:
            continue
        if all(user in hosts or _only_updated(node, user, calls.get(user, ())) for user in node.users):
            value = node.meta["val"]
            if isinstance(value, torch.Tensor) or not free_symbols(value) & baked:
                hosts.add(node)
    return frozenset(hosts)


def shape_symbols(graph: fx.Graph) -> set[Any]:
    """The symbols (of sympy) in the shapes and strides of a graph's tensors."""
    return {symbol for node in graph.nodes for leaf in tensor_leaves(node) for symbol in _shape_symbols(leaf)}


def _shape_symbols(tensor: torch.Tensor) -> set[Any]:
    numbers = (*tensor.size(), *tensor.stride(), tensor.storage_offset())
    return {symbol for number in numbers if isinstance(number, torch.SymInt) for symbol in free_symbols(number)}


def _only_updated(node: fx.Node, call: fx.Node, names: tuple[str, ...]) -> bool:
    """Whether ``call`` takes ``node`` through the arguments ``names`` and through no other."""
    others = {name: value for name, value in _given(call).items() if name not in names}
    return bool(names) and node not in set(_nodes(others))


def _evaluator(gm: fx.GraphModule, calls: dict[fx.Node, tuple[str, ...]]) -> Callable[..., list[dict[str, Any]]]:
    """A function of the graph's inputs that computes the host arguments of each call, and nothing else."""
    graph, twins = fx.Graph(), dict[fx.Node, fx.Node]()
    wanted = [{name: _given(call)[name] for name in names} for call, names in calls.items()]
    needed = set(_nodes(wanted))
    for node in reversed(gm.graph.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    for node in gm.graph.nodes:
        if node in needed or node.op == "placeholder":
            twins[node] = graph.node_copy(node, lambda argument: twins[argument])
    graph.output(fx.map_arg(wanted, lambda argument: twins[argument]))
    function: Callable[..., list[dict[str, Any]]] = fx.GraphModule(gm, graph).forward
    return function
