"""Facts about collectives: which nodes communicate, in which group, and how long they use memory.

The functional collectives of torch.distributed are asynchronous: a collective starts at its node and is over at the
`wait_tensor` of its result. All that time it reads its inputs and writes its results. The operators of torch_npu that compute
and communicate together run at their place, like any kernel.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable

import torch
from torch import fx
from torch._ops import OpOverload, OpOverloadPacket

from npugraph_ex import _torch_private

_ASYNCHRONOUS = frozenset({"_c10d_functional", "c10d_functional", "_c10d_functional_autograd"})
_RECEIVING = frozenset({"irecv", "batch_p2p_ops"})
_GROUPS = frozenset({"group_name", "group", "group_ep", "group_tp", "hcom", "process_group"})
"""The names of the group argument in schemas."""


@functools.cache
def _group_argument(target: OpOverload) -> tuple[int, str] | None:
    """The position and the name of the group argument; None for an operator that does not communicate."""
    schema = _torch_private.schema(target)
    for position, argument in enumerate(schema.arguments):
        is_number = isinstance(argument.type, torch.IntType)  # the groups of a normalisation
        if argument.name in _GROUPS and not is_number:
            return position, argument.name
    return None


def communicates(target: OpOverload) -> bool:
    """Whether an operator takes a group of processes."""
    return _group_argument(target) is not None


def is_collective(node: fx.Node) -> bool:
    """Whether ``node`` communicates with other processes. Then it must run as often and in the same order as there."""
    return isinstance(node.target, OpOverload) and communicates(node.target)


def sequence(graph: fx.Graph) -> tuple[tuple[str, str], ...]:
    """The collectives of ``graph`` in order: each one's operation and group."""
    return tuple((str(node.target), group_of(node)) for node in graph.nodes if is_collective(node))


def overloads_in(gm: fx.GraphModule, wanted: Callable[[OpOverload], bool] = communicates) -> set[OpOverload]:
    """The operators that communicate in a Dynamo graph and the graphs inside it; of an operator's name, all its overloads.

    Args:
        gm: the graph.
        wanted: another question than whether an operator communicates.
    """
    targets = {node.target for part in gm.modules() if isinstance(part, fx.GraphModule) for node in part.graph.nodes}
    packets = [target for target in targets if isinstance(target, OpOverloadPacket)]
    named = {getattr(packet, overload) for packet in packets for overload in packet.overloads()}
    return {target for target in targets | named if isinstance(target, OpOverload) and wanted(target)}


@functools.cache
def _operator(target: OpOverload) -> str:
    """The name of an operator of torch.distributed; empty for every other operator."""
    namespace, _, name = _torch_private.schema(target).name.partition("::")
    return name if namespace in _ASYNCHRONOUS else ""


def waits(target: OpOverload) -> bool:
    """Whether an operator waits for a functional collective; its result is its argument's memory."""
    return _operator(target) == "wait_tensor"


def is_wait(node: fx.Node) -> bool:
    """Whether ``node`` calls an operator that `waits`."""
    return isinstance(node.target, OpOverload) and waits(node.target)


def receives(target: OpOverload) -> bool:
    """Whether an operator receives into its arguments and returns them, which no schema declares."""
    return _operator(target) in _RECEIVING


def is_asynchronous(node: fx.Node) -> bool:
    """Whether ``node`` is a collective that runs until a wait for its result."""
    return is_collective(node) and isinstance(node.target, OpOverload) and node.target.namespace in _ASYNCHRONOUS


def group_of(node: fx.Node) -> str:
    """The group argument of a collective."""
    argument = _group_argument(node.target) if isinstance(node.target, OpOverload) else None
    if argument is None:
        return ""
    position, name = argument
    return str(node.args[position] if position < len(node.args) else node.kwargs.get(name, ""))


def waits_of(collective: fx.Node) -> list[fx.Node]:
    """The nodes that wait for an asynchronous collective, in graph order."""
    users = [user for part in (collective, *_parts(collective)) for user in part.users]
    return sorted({user for user in users if is_wait(user)})


def awaited_by(wait: fx.Node) -> fx.Node | None:
    """The collective that a node waits for; None for a collective outside the graph, or for another node."""
    source = wait.args[0] if is_wait(wait) and wait.args else None
    while isinstance(source, fx.Node) and source.target is operator.getitem:
        source = source.args[0]
    return source if isinstance(source, fx.Node) and is_asynchronous(source) else None


def _parts(node: fx.Node) -> list[fx.Node]:
    return [user for user in node.users if user.target is operator.getitem]
