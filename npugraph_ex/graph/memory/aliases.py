"""The bytes that each node of a graph lies in, reads and writes. No other module computes this.

It has two sources: storage, offset and strides of the fake tensors in ``node.meta["val"]``, and what operator schemas
declare (``Tensor(a)``). If neither knows, memory is assumed to overlap and an operator is assumed to write its inputs.

Every pass takes these facts from here:

* which bytes: ``AliasFacts.regions(node)``, ``reads(node)``, ``writes(node)``, as `Region` (storage, first byte, end);
* whether a write to one value may be seen through another: ``is_written``, ``touches``, `Region.overlaps`;
* whether two values lie in one storage, which callers can see even where no byte is common: ``share_storage``.

`memory_map` puts these facts in the order of the graph, for passes that move values into other memory.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

import torch
from torch import fx
from torch.utils import _pytree as pytree

from npugraph_ex import _torch_private
from npugraph_ex.graph.collectives import communicates
from npugraph_ex.graph.memory.regions import UNKNOWN, Region, Union
from npugraph_ex.graph.operators import (
    counts_from_the_storage,
    is_view,
    keeps_the_storage,
    may_alias,
    named_arguments,
    reaches_beyond,
    read_by,
    schema_of,
    tensor_leaves,
    written_by,
)

__all__ = [
    "AliasFacts",
    "communicates",
    "counted_storages",
    "counts_from_the_storage",
    "inputs_left_behind",
    "is_view",
    "may_begin_elsewhere",
    "mutated_inputs",
    "named_arguments",
    "output_values",
    "reaches_beyond",
    "read_by",
    "schema_of",
    "tensor_leaves",
    "written_by",
]


def output_values(graph: fx.Graph) -> list[object]:
    """The graph's outputs in order, as a flat list of nodes and constants."""
    output = next(iter(graph.find_nodes(op="output")))
    return list(pytree.tree_leaves(output.args[0], is_leaf=lambda leaf: leaf is None))


class AliasFacts:
    """Memory, reads and writes of one graph in its present state. After an edit of the graph, build new facts or `update` these.

    Args:
        graph: its nodes carry fake tensors in ``meta["val"]``.

    Attributes:
        writers: the nodes that write memory, in graph order.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._parent: dict[int, int] = {}  # storages that are one by the schemas, although not by their tensors
        self._regions: dict[fx.Node, tuple[Region, ...]] = {}
        self._tensors: dict[int, torch.Tensor] = {}  # by storage, one tensor in it, for the storage's size
        self._makers: dict[int, fx.Node] = {}  # by storage, the first node with a tensor in it
        self.writers: list[fx.Node] = []
        for node in graph.nodes:
            self.add(node)
            if node.op != "placeholder" and written_by(node):
                self.writers.append(node)
        self._written = Union(region for writer in self.writers for region in self.writes(writer))

    def update(self, changed: Iterable[fx.Node]) -> None:
        """Take in nodes that are new or whose metadata changed, in graph order. No writer was erased."""
        for node in changed:
            self.add(node)
            if written_by(node) and node not in self.writers:
                insort(self.writers, node)
        self._written = Union(region for writer in self.writers for region in self.writes(writer))

    def add(self, node: fx.Node) -> None:
        """Add a node that was inserted later; it writes nothing, and its arguments are known."""
        self._regions[node] = self._lies_in(node)
        self._join_declared_aliases(node)

    def __contains__(self, node: fx.Node) -> bool:
        """Whether these facts include ``node``."""
        return node in self._regions

    def regions(self, node: fx.Node) -> tuple[Region, ...]:
        """The regions of the tensors of ``node``, in order. Equal roots mean one memory."""
        regions = self._regions[node]
        if not self._parent or not regions:
            return regions
        # Storages that were joined have different offsets, so their bytes cannot be compared.
        roots = [self._find(region.root) for region in regions]
        return tuple(
            Region(root) if root in self._parent else region for root, region in zip(roots, regions, strict=True)
        )

    def is_own(self, node: fx.Node) -> bool:
        """Whether no earlier node has a tensor in the storages of ``node``; it may have been removed since."""
        return all(self._makers.get(region.root) is node for region in self._regions[node]) and not self.is_joined(node)

    def is_joined(self, node: fx.Node) -> bool:
        """Whether ``node`` may lie in memory that its tensors do not show, at any place there."""
        return any(region.root in self._parent for region in self._regions[node])

    def roots(self, node: fx.Node) -> frozenset[int]:
        """Names of the memory that the tensors of ``node`` lie in; equal names mean shared memory."""
        return frozenset([region.root for region in self.regions(node)])

    def reads(self, node: fx.Node) -> tuple[Region, ...]:
        """The bytes that ``node`` may read."""
        return tuple(region for argument in read_by(node) for region in self.read_regions(node, argument))

    def read_regions(self, node: fx.Node, argument: fx.Node) -> tuple[Region, ...]:
        """The bytes that ``node`` may read of ``argument``, one of those that `read_by` names."""
        regions = self.regions(argument)
        return tuple(Region(region.root) for region in regions) if reaches_beyond(node) else regions

    def writes(self, node: fx.Node) -> tuple[Region, ...]:
        """The bytes that ``node`` may write, besides those of new memory that it returns."""
        return tuple(region for argument in written_by(node) for region in self.regions(argument))

    def share_storage(self, first: fx.Node, second: fx.Node) -> bool:
        """Whether the two may lie in one storage, even in different bytes."""
        left, right = self.roots(first), self.roots(second)
        if not left or not right:
            return False
        return UNKNOWN in left or UNKNOWN in right or not left.isdisjoint(right)

    def is_written(self, node: fx.Node) -> bool:
        """Whether anything in the graph may write bytes of ``node``."""
        return any(self._written.overlaps(region) for region in self.regions(node))

    def storage_bytes(self, root: int) -> int | torch.SymInt | None:
        """The size of the storage named ``root``; None if it is unknown."""
        tensor = self._tensors.get(root)
        return None if tensor is None else tensor.untyped_storage().nbytes()

    def writers_between(self, first: fx.Node, last: fx.Node) -> list[fx.Node]:
        """The writers strictly after ``first`` and strictly before ``last``, in graph order."""
        start = bisect_left(self.writers, first)
        stop = bisect_left(self.writers, last)
        return [writer for writer in self.writers[start:stop] if writer is not first]

    def touches(self, writer: fx.Node, nodes: Iterable[fx.Node]) -> fx.Node | None:
        """The first of ``nodes`` whose bytes ``writer`` may write."""
        written = self.writes(writer)
        return next(
            (
                node
                for node in nodes
                if any(region.overlaps(other) for region in self.regions(node) for other in written)
            ),
            None,
        )

    def _lies_in(self, node: fx.Node) -> tuple[Region, ...]:
        if "val" not in node.meta:
            return (Region(UNKNOWN),) if node.op not in ("output", "get_attr") else ()
        regions = []
        for leaf in tensor_leaves(node):
            root = _torch_private.storage_key(leaf)
            self._tensors[root] = leaf
            self._makers.setdefault(root, node)
            regions.append(Region.from_tensor(leaf, root))
        return tuple(regions)

    def _join_declared_aliases(self, node: fx.Node) -> None:
        sources = may_alias(node)
        if not sources:
            return
        known = {region.root for source in sources for region in self._regions[source]}
        # An operator with several results declares only that each lies in some argument. If the tensors show which one, they
        # decide.
        if all(region.root in known for region in self._regions[node]):
            return
        for source in sources:
            self._join(self._regions[node], self._regions[source])

    def _join(self, left: tuple[Region, ...], right: tuple[Region, ...]) -> None:
        if len(left) == len(right) == 1 and left[0].root == right[0].root:
            return
        storages = {self._find(region.root) for region in (*left, *right)}
        if len(storages) < 2 or not left or not right:
            return
        head = UNKNOWN if UNKNOWN in storages else min(storages)
        for storage in storages:
            self._parent[storage] = head

    def _find(self, storage: int) -> int:
        parent = self._parent.get(storage, storage)
        while parent != storage:
            self._parent[storage] = self._parent[parent]
            storage, parent = parent, self._parent[parent]
        return storage


def inputs_left_behind(graph: fx.Graph, facts: AliasFacts) -> frozenset[int]:
    """Inputs whose storage the graph accesses outside the input's own byte range, as `as_strided` can; by position.

    With symbolic sizes any `as_strided` may do so. So may one with an offset from the beginning of the storage: no guard
    fixes an input's own offset, so another call may pass an input at another offset.
    """
    own: dict[int, list[tuple[int, Region]]] = {}
    for position, node in enumerate(graph.find_nodes(op="placeholder")):
        for region in facts.regions(node):
            own.setdefault(region.root, []).append((position, region))
    beyond = set()
    for node in filter(reaches_beyond, graph.nodes):
        counting = counts_from_the_storage(node)
        for region in facts.regions(node) if is_view(node) else facts.read_regions(node, node.all_input_nodes[0]):
            # Several inputs may share the storage; this may be a view of any of them.
            for position, mine in own.get(region.root, ()):
                if counting or not (region.is_exact and mine.is_exact and mine.covers(region)):
                    beyond.add(position)
    counted = {root for value in counted_storages(graph, facts) for root in facts.roots(value)}
    return frozenset(beyond | {position for root in counted for position, _ in own.get(root, ())})


def counted_storages(graph: fx.Graph, facts: AliasFacts | None = None) -> list[fx.Node]:
    """The values in whose storage a node counts from the beginning. What takes the place of one must begin where it begins.

    A scatter of one counts, too: its storage begins as that of what it was made from. So does one that leaves: its caller counts.
    """
    counted = [node.all_input_nodes[0] for node in graph.nodes if counts_from_the_storage(node)]
    if not (counted or any(map(keeps_the_storage, graph.nodes))):
        return []
    facts = facts or AliasFacts(graph)
    leaving = [value for value in output_values(graph) if isinstance(value, fx.Node)]
    roots = {root for value in (*counted, *leaving) for root in facts.roots(value)}
    for node in reversed(graph.nodes):
        if keeps_the_storage(node) and not roots.isdisjoint(facts.roots(node)):
            counted.append(node.all_input_nodes[0])
            roots |= facts.roots(node.all_input_nodes[0])
    return counted


def may_begin_elsewhere(graph: fx.Graph, facts: AliasFacts) -> frozenset[int]:
    """The memory of the inputs and of what is written back to them, except bases that AOT made, which always are whole storages."""
    nodes = [node for node in graph.find_nodes(op="placeholder") if not _torch_private.is_synthetic_base(node)]
    inputs = frozenset(root for node in nodes for root in facts.roots(node))
    writes = graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    written = (write.args[1] for write in writes if not inputs.isdisjoint(facts.roots(write.args[0])))
    return inputs.union(root for value in written if isinstance(value, fx.Node) for root in facts.roots(value))


def mutated_inputs(graph: fx.Graph, facts: AliasFacts) -> frozenset[int]:
    """The positions of the placeholders whose memory the graph writes."""
    placeholders = graph.find_nodes(op="placeholder")
    return frozenset(position for position, node in enumerate(placeholders) if facts.is_written(node))
