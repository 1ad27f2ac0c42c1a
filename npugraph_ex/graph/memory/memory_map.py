"""The reads and writes of a graph in their order, for passes that move values into other memory.

`AliasFacts` gives the memory of each value. `MemoryMap` gives the accesses to those bytes before and after a node. A pass
that moves a value into another value's memory calls `merge`, so that later answers use the new layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from heapq import merge
from operator import attrgetter

import torch
from torch import fx

from npugraph_ex import _torch_private
from npugraph_ex.graph.memory.aliases import (
    AliasFacts,
    may_begin_elsewhere,
    read_by,
    schema_of,
    tensor_leaves,
    written_by,
)
from npugraph_ex.graph.memory.history import History, MemoryAccess
from npugraph_ex.graph.memory.regions import EVERYWHERE, UNKNOWN, Region
from npugraph_ex.graph.memory.strides import share_no_byte
from npugraph_ex.graph.operators import keeps_the_storage, returned_argument


class MemoryMap:
    """The memory of one graph and every access to it.

    Args:
        graph: its nodes carry fake tensors in ``meta["val"]``.

    Attributes:
        position: each node's place in the graph's order.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._facts = AliasFacts(graph)
        self.position = {node: index for index, node in enumerate(graph.nodes)}
        self._shift: dict[int, tuple[int, int | None]] = {}  # merged root -> (new root, bytes to add if known)
        self._same: dict[fx.Node, fx.Node] = {}  # node -> node with exactly the same bytes and layout
        self._reads: dict[int, History] = {}
        self._writes: dict[int, History] = {}
        self.inputs = frozenset(
            root
            for op in ("placeholder", "get_attr")
            for node in graph.find_nodes(op=op)
            for root in self._facts.roots(node)
        )
        for node in graph.nodes:
            self._note(node)
            returned = returned_argument(node)
            if returned is not None:
                self._same[node] = returned
        self._kept: set[int] = set()  # copies of storages of which the metadata does not tell the size
        movable = may_begin_elsewhere(graph, self._facts)
        for node in filter(keeps_the_storage, graph.nodes):
            base = node.all_input_nodes[0]
            if not movable.isdisjoint(self._facts.roots(base)) or not self.owns_memory(base):
                self._kept |= self._facts.roots(node)

    def _note(self, node: fx.Node) -> None:
        for value in read_by(node):
            self._add(self._reads, node, value, self._facts.read_regions(node, value))
        for value in written_by(node):
            self._add(self._writes, node, value, self._facts.regions(value))

    def _add(self, accesses: dict[int, History], node: fx.Node, value: fx.Node, regions: Iterable[Region]) -> None:
        for region in map(self._after_merges, regions):
            self._history(accesses, region.root).add(MemoryAccess(self.position[node], node, value, region))

    def _history(self, accesses: dict[int, History], root: int) -> History:
        if root not in accesses:
            accesses[root] = History(len(self.position))
        return accesses[root]

    def __contains__(self, node: fx.Node) -> bool:
        """Whether this map includes ``node``."""
        return node in self._facts

    def regions(self, node: fx.Node) -> list[Region]:
        """The regions of the tensors of ``node``."""
        return [self._after_merges(region) for region in self._facts.regions(node)]

    def region_of(self, tensor: torch.Tensor) -> Region:
        """The region of a view of one of the graph's fake tensors."""
        return self._after_merges(Region.from_tensor(tensor, _torch_private.storage_key(tensor)))

    def region(self, node: fx.Node) -> Region | None:
        """The region of ``node``, if it is one tensor in one known memory."""
        regions = self.regions(node)
        return regions[0] if len(regions) == 1 and regions[0].root != UNKNOWN else None

    def is_input(self, node: fx.Node) -> bool:
        """Whether ``node`` may lie in an input, as a whole or a part."""
        return any(region.root in self.inputs for region in self.regions(node))

    def _after_merges(self, region: Region) -> Region:
        root, start, stop = region
        while root in self._shift:
            root, delta = self._shift[root]
            if delta is None or stop == EVERYWHERE:
                start, stop = 0, EVERYWHERE
            else:
                start, stop = start + delta, stop + delta
        return Region(root, start, stop)

    def is_same(self, first: fx.Node, second: fx.Node) -> bool:
        """Whether two values of equal layout are known to be the same bytes."""
        if self._original(first) is self._original(second):
            return True
        here, there = self.region(first), self.region(second)
        return here is not None and here == there and here.is_exact

    def owns_memory(self, node: fx.Node) -> bool:
        """Whether ``node`` is a whole allocation: allocated as one, or known to span all its bytes."""
        original = self._original(node)
        if not self._kept.isdisjoint(self._facts.roots(original)):
            return False
        schema = schema_of(original)
        declares = schema is None or any(result.alias_info is not None for result in schema.returns)
        if not declares and self._facts.is_own(original):
            return True
        region = self.region(node)
        if region is None or region.start:
            return False
        size = self._facts.storage_bytes(region.root)
        # Only numbers are compared, because a comparison of a symbol with a number would add a guard.
        return type(size) is int and region.stop == size

    def begins_as(self, node: fx.Node, target: fx.Node) -> bool:
        """Whether ``target``, where it lies now, begins at the element of its storage at which ``node`` begins in its own."""
        original = self._original(target)
        offsets = {str(leaf.storage_offset()) for one in (node, original) for leaf in tensor_leaves(one)}
        return len(offsets) == 1 and not self._facts.is_joined(original)

    def leaves(self, region: Region) -> bool:
        """Whether an output of the graph lies in bytes of ``region``."""
        return any(access.node.op == "output" for access in self.reads_after(region, -1))

    def _original(self, node: fx.Node) -> fx.Node:
        passed = []
        while node in self._same:
            passed.append(node)
            node = self._same[node]
        self._same.update(
            dict.fromkeys(passed[:-1], node)
        )  # otherwise chains of in-place operators would be walked again and again
        return node

    def overlap(self, first: fx.Node, second: fx.Node) -> bool:
        """Whether two values may have a byte in common; assumed where either's memory is unknown."""
        others = self.regions(second)
        return any(region.overlaps(other) for region in self.regions(first) for other in others)

    def reads_after(self, region: Region, position: int) -> Iterator[MemoryAccess]:
        """Reads of bytes of ``region`` by nodes later than ``position``, in order."""
        return self._after(self._reads, region, position)

    def writes_after(self, region: Region, position: int) -> Iterator[MemoryAccess]:
        """Writes to bytes of ``region`` by nodes later than ``position``, in order."""
        return self._after(self._writes, region, position)

    def written_anew(self, region: Region, position: int) -> int | None:
        """The position after ``position`` at which a copy into an input overwrites all bytes of ``region``."""
        for write in self.writes_after(region, position):
            copies = write.node.target is torch.ops.aten.copy_.default and write.node.args[0] is write.value
            if copies and write.value.op == "placeholder" and write.region.covers(region):
                return write.position
        return None

    def accesses(self, node: fx.Node) -> Iterator[MemoryAccess]:
        """All accesses to the bytes of ``node``."""
        for region in self.regions(node):
            yield from self.reads_after(region, -1)
            yield from self.writes_after(region, -1)

    def _after(self, accesses: dict[int, History], region: Region, position: int) -> Iterator[MemoryAccess]:
        roots = list(accesses) if region.root == UNKNOWN else (region.root, UNKNOWN)
        found = [accesses[root].after(region, position) for root in roots if root in accesses]
        return merge(*found, key=attrgetter("position"))

    def merge(self, value: fx.Node, target: fx.Node) -> None:
        """Record that ``value`` now lies exactly where ``target`` lies; everything in its memory moves with it."""
        own, into = self.region(value), self.region(target)
        if own is None or into is None:
            raise ValueError(f"{value.name} or {target.name} has no single known memory")
        known = own.is_exact and into.is_exact
        self._shift[own.root] = (into.root, into.start - own.start if known else None)
        self._same[value] = target
        for accesses in (self._reads, self._writes):
            if own.root in accesses:
                history = self._history(accesses, into.root)
                for access in accesses.pop(own.root):
                    history.add(replace(access, region=self._after_merges(access.region)))

    def is_apart(self, access: MemoryAccess, part: torch.Tensor) -> bool:
        """Whether an access provably touches no byte of a view of one of the graph's fake tensors."""
        region = self.region_of(part)
        if not access.region.overlaps(region):
            return True
        if not (access.region.is_exact and region.is_exact):
            return False
        tensors = tensor_leaves(access.value)
        return len(tensors) == 1 and share_no_byte(tensors[0], part, starts=(access.region.start, region.start))

    def no_longer_reads(self, node: fx.Node, value: fx.Node) -> None:
        """Record that ``node``, which read all of ``value``, no longer reads it."""
        for root in {region.root for region in self.regions(value)} & self._reads.keys():
            reads = [access for access in self._reads[root] if access.node is node]
            for access in reads:
                if self.is_same(access.value, value):
                    self._reads[root].remove(access)

    def moved_before(self, node: fx.Node, other: fx.Node) -> None:
        """Record that ``node``, which writes nothing, stands before ``other`` now. It gets the same position."""
        self.position[node] = self.position[other]
        for root in {region.root for value in read_by(node) for region in self.regions(value)}:
            for read in [access for access in self._reads.get(root, ()) if access.node is node]:
                self._reads[root].remove(read)
                self._reads[root].add(replace(read, position=self.position[node]))

    def add(self, view: fx.Node) -> None:
        """Add a view that was inserted later; its position is known."""
        self._facts.add(view)

    def wrote(self, node: fx.Node, value: fx.Node) -> None:
        """Record that ``node``, which had no effect, now writes the memory of ``value``."""
        self._add(self._writes, node, value, self._facts.regions(value))
