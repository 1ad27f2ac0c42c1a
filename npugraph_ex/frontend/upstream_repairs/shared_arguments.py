"""Finds calls of an operator that writes one argument while another one shares its memory, where AOT gives it old contents.

AOT makes a write of an operator that is not torch's functional: the operator gets a copy of what it writes. So it cannot see
its own writes in an argument that it only reads (`op(x, state=x[0])`). Two arguments that it writes are views of one copy, unless
a `detach` lies between them: then each has a copy, and one write is lost. Such a program runs operator by operator.

Separate elements of one storage, such as two slices of a cache, are no fault.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils import _pytree as pytree

from npugraph_ex import _torch_private
from npugraph_ex.frontend.upstream_repairs.layouts import name_of_call
from npugraph_ex.graph.memory.overlap import may_share_elements, share_storage
from npugraph_ex.graph.nested_regions import all_graphs
from npugraph_ex.graph.operators import named_arguments
from npugraph_ex.graph.source import source_line
from npugraph_ex.versions.repair import NOT_REPORTED, Repair

REPAIR = Repair(
    fault="An operator that is not torch's reads the old contents of an argument that shares memory with one that it writes.",
    threads=NOT_REPORTED,
    test="tests/frontend/test_shared_arguments.py",
)

_OF_TORCH = frozenset({"aten", "prims", "prim"})
"""Torch itself makes functional what these write: they read all arguments before they write."""
_WITHOUT_BASE = frozenset({"detach", "detach_", "_get_data_attr"})
"""Functions whose result AOT does not take for a view of their argument."""


class _PassedTensor(NamedTuple):
    """A tensor among a call's arguments: the argument's name, the node of the tensor and its value, whether it is written."""

    name: str
    node: fx.Node
    value: torch.Tensor
    is_written: bool


def stale_read(gm: fx.GraphModule) -> str:
    """Which call of a Dynamo graph AOT would get wrong, in words; empty if there is none."""
    for graph in all_graphs(gm.graph):
        for node in graph.nodes:
            for operator in _writers(node.target):
                for one, other in combinations(_arguments(node, operator), 2):
                    if _is_wrong(one, other):
                        return _in_words(node, operator, one, other)
    return ""


def _writers(target: object) -> list[OpOverload]:
    """The overloads that a node may call, if they are not torch's and write an argument."""
    if isinstance(target, OpOverloadPacket):
        overloads = [getattr(target, name) for name in target.overloads()]
    else:
        overloads = [target] if isinstance(target, OpOverload) else []
    return [
        overload
        for overload in overloads
        if overload.namespace not in _OF_TORCH and _torch_private.schema(overload).is_mutable
    ]


def _arguments(node: fx.Node, operator: OpOverload) -> Iterator[_PassedTensor]:
    """The tensors that a call passes, also those in lists."""
    given: Mapping[str, Any] = named_arguments(operator, node.args, node.kwargs)
    for argument in _torch_private.schema(operator).arguments:
        written = argument.alias_info is not None and argument.alias_info.is_write
        for leaf in pytree.tree_leaves(given.get(argument.name)):
            if isinstance(leaf, fx.Node):
                yield from (_PassedTensor(argument.name, leaf, value, written) for value in _tensors(leaf))


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    value = node.meta.get("example_value", node.meta.get("val"))
    return [
        leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
    ]


def _is_wrong(one: _PassedTensor, other: _PassedTensor) -> bool:
    if not (one.is_written or other.is_written) or not share_storage(one.value, other.value):
        return False
    if one.is_written and other.is_written:
        first, second = _base(one.node), _base(other.node)
        # Of inputs that share memory AOT makes views of one base.
        return first is not second and not first.op == second.op == "placeholder"
    return may_share_elements(one.value, other.value)


def _base(node: fx.Node) -> fx.Node:
    """The tensor that AOT copies for ``node``: the one of which it is a view, or a view of a view."""
    while not _has_no_base(node):
        mine = _tensors(node)
        sources = [
            source
            for source in node.all_input_nodes
            if any(share_storage(a, b) for a in mine for b in _tensors(source))
        ]
        if not sources:
            break
        node = sources[0]
    return node


def _has_no_base(node: fx.Node) -> bool:
    name = name_of_call(node)
    return name.partition(".")[0] in _WITHOUT_BASE


def _in_words(node: fx.Node, operator: OpOverload, one: _PassedTensor, other: _PassedTensor) -> str:
    written, second = (one, other) if one.is_written else (other, one)
    line = source_line(node)
    same = "itself" if written.name == second.name else f"{second.name!r}"
    return (
        f"{operator} writes its argument {written.name!r}, which shares memory with {same}"
        f"{f' ({line})' if line else ''}; AOT would give it a copy, which the other argument does not see. Pass separate memory"
    )
