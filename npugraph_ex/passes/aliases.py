"""The one place that knows which nodes of a graph share memory, and which nodes write it.

Two sources are joined: the storages of the fake tensors in ``node.meta["val"]``, and what operator schemas declare
(``Tensor(a)``). Where neither knows, memory is assumed to overlap and an operator is assumed to write its inputs.
The unit is the whole storage; byte ranges within one storage are not told apart.
"""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections.abc import Iterable, Iterator

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from npugraph_ex import _torch_private

UNKNOWN = -1
"""The name of memory of which nothing is known."""


def output_values(graph: fx.Graph) -> list[object]:
    """The graph's outputs in order, flat: nodes, and constants where an output is one."""
    output = next(iter(graph.find_nodes(op="output")))
    return list(pytree.tree_leaves(output.args[0], is_leaf=lambda leaf: leaf is None))


def tensor_leaves(node: fx.Node) -> list[torch.Tensor]:
    """The fake tensors that ``node`` produces."""
    return [leaf for leaf in pytree.tree_leaves(node.meta.get("val")) if isinstance(leaf, torch.Tensor)]


def schema_of(node: fx.Node) -> torch.FunctionSchema | None:
    """The schema of the operator that ``node`` calls, if it calls an ATen-style one."""
    return _torch_private.schema(node.target) if isinstance(node.target, OpOverload) else None


def _nodes_in(value: object) -> Iterator[fx.Node]:
    """The nodes in one argument, which may be a list."""
    return (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, fx.Node))


def _argument(node: fx.Node, position: int, argument: torch.Argument) -> object:
    """What ``node`` passes for a schema argument; None when it is left out."""
    if not argument.kwarg_only and position < len(node.args):
        return node.args[position]
    return node.kwargs.get(argument.name)


def written_by(node: fx.Node) -> tuple[fx.Node, ...]:
    """The argument nodes whose memory ``node`` writes, by its schema; all of them where there is no schema."""
    if node.op not in ("call_function", "call_method", "call_module"):
        return ()
    schema = schema_of(node)
    if schema is None:
        if node.target is operator.getitem or node.target in _torch_private.auto_functionalized_operators():
            return ()
        return tuple(argument for argument in node.all_input_nodes if tensor_leaves(argument))
    if not schema.is_mutable:
        return ()
    return tuple(
        written
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
        for written in _nodes_in(_argument(node, position, argument))
    )


class AliasFacts:
    """Sharing and writing in one graph, as it is now. Build it anew after the graph was edited.

    Args:
        graph: its nodes carry fake tensors in ``meta["val"]``.

    Attributes:
        writers: the nodes that write memory, in graph order.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._parent: dict[int, int] = {}
        self._roots: dict[fx.Node, tuple[int, ...]] = {}
        self.writers: list[fx.Node] = []
        for node in graph.nodes:
            self.add(node)
            if written_by(node):
                self.writers.append(node)
        self._written = {root for writer in self.writers for node in written_by(writer) for root in self.roots(node)}

    def add(self, node: fx.Node) -> None:
        """Take in a node that was inserted since, which writes nothing and whose arguments are known."""
        self._roots[node] = self._storages(node)
        self._join_declared_aliases(node)

    def roots(self, node: fx.Node) -> frozenset[int]:
        """Names of the memory that the tensors of ``node`` lie in; equal names mean shared memory."""
        return frozenset(self._find(storage) for storage in self._roots[node])

    def may_overlap(self, first: fx.Node, second: fx.Node) -> bool:
        """Whether a write to one could be seen through the other."""
        left, right = self.roots(first), self.roots(second)
        if not left or not right:
            return False
        return UNKNOWN in left or UNKNOWN in right or not left.isdisjoint(right)

    def is_written(self, node: fx.Node) -> bool:
        """Whether anything in the graph writes memory that ``node`` lies in."""
        roots = self.roots(node)
        if not roots or not self._written:
            return False
        return UNKNOWN in roots or UNKNOWN in self._written or not roots.isdisjoint(self._written)

    def writers_between(self, first: fx.Node, last: fx.Node) -> list[fx.Node]:
        """The writers strictly after ``first`` and strictly before ``last``, in graph order."""
        start = bisect_left(self.writers, first)
        stop = bisect_left(self.writers, last)
        return [writer for writer in self.writers[start:stop] if writer is not first]

    def touches(self, writer: fx.Node, nodes: Iterable[fx.Node]) -> fx.Node | None:
        """The first of ``nodes`` whose memory ``writer`` may write."""
        targets = written_by(writer)
        return next((node for node in nodes if any(self.may_overlap(node, target) for target in targets)), None)

    def _storages(self, node: fx.Node) -> tuple[int, ...]:
        if "val" not in node.meta:
            return (UNKNOWN,) if node.op not in ("output", "get_attr") else ()
        return tuple(_torch_private.storage_key(leaf) for leaf in tensor_leaves(node))

    def _join_declared_aliases(self, node: fx.Node) -> None:
        schema = schema_of(node)
        if schema is None:
            return
        for result in schema.returns:
            if result.alias_info is None:
                continue
            for position, argument in enumerate(schema.arguments):
                if argument.alias_info is None:
                    continue
                # The alias set of a list result, ``Tensor(a)[]``, is not kept: it may be any argument's.
                if result.alias_info.before_set in (set(), argument.alias_info.before_set):
                    for source in _nodes_in(_argument(node, position, argument)):
                        self._join(self._roots[node], self._roots[source])

    def _join(self, left: tuple[int, ...], right: tuple[int, ...]) -> None:
        for storage in (*left, *right):
            for other in right[:1]:
                self._parent[self._find(storage)] = self._find(other)

    def _find(self, storage: int) -> int:
        parent = self._parent.setdefault(storage, storage)
        while parent != storage:
            self._parent[storage] = self._parent.setdefault(parent, parent)
            storage, parent = parent, self._parent[parent]
        return storage


def mutated_inputs(graph: fx.Graph, facts: AliasFacts) -> frozenset[int]:
    """The positions of the placeholders whose memory the graph writes."""
    placeholders = graph.find_nodes(op="placeholder")
    return frozenset(position for position, node in enumerate(placeholders) if facts.is_written(node))
