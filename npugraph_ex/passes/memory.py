"""Where each value of a graph lies, in bytes, and who reads and writes there: what decides whether memory may be reused.

`AliasFacts` says which values may share a storage. `MemoryMap` says more where more is known: the byte range within it.
Where it is not known (symbolic sizes, several tensors in one node) the range is the whole storage. A pass that makes an
operator write into another value's memory tells the map with `merge`, so that later questions see the new layout.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from npugraph_ex.passes.aliases import UNKNOWN, AliasFacts, schema_of, tensor_leaves, written_by

WHOLE = (0, 1 << 62)
"""The byte range of which nothing is known but that it lies in the storage."""


@dataclass(frozen=True)
class Region:
    """Bytes ``start`` (inclusive) to ``stop`` (exclusive) of the memory named ``root``."""

    root: int
    start: int
    stop: int

    def overlaps(self, other: Region) -> bool:
        """Whether the two have a byte in common."""
        return self.root == other.root and self.start < other.stop and other.start < self.stop


@dataclass(frozen=True)
class Access:
    """One node touching one value's memory, at one place in the graph's order."""

    position: int
    node: fx.Node
    value: fx.Node


def byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte and one past the last byte that ``tensor`` spans in its storage; `WHOLE` if not known, or none."""
    numbers = (*tensor.size(), *tensor.stride(), tensor.storage_offset())
    if not all(isinstance(number, int) for number in numbers):
        return WHOLE
    if tensor.numel() == 0:
        return WHOLE  # it has no bytes, yet whose memory it lies in can be seen
    start = int(tensor.storage_offset())
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    width = tensor.element_size()
    return start * width, (start + int(span)) * width


def _returns_first_argument(node: fx.Node) -> bool:
    """Whether ``node`` is an in-place operator, whose result is its first argument itself."""
    schema = schema_of(node)
    if schema is None or len(schema.returns) != 1 or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    result, first = schema.returns[0].alias_info, schema.arguments[0].alias_info
    return result is not None and result.is_write and first is not None and result.before_set == first.before_set


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
        self._shift: dict[int, tuple[int, int | None]] = {}  # merged root -> (root it went into, bytes to add if known)
        self._same: dict[fx.Node, fx.Node] = {}  # node -> node of exactly the same bytes and layout
        self._reads: dict[int, list[Access]] = defaultdict(list)
        self._writes: dict[int, list[Access]] = defaultdict(list)
        self.inputs = frozenset(
            root for node in graph.find_nodes(op="placeholder") for root in self._facts.roots(node)
        ) | frozenset(root for node in graph.find_nodes(op="get_attr") for root in self._facts.roots(node))
        self._bytes: dict[int, object] = {}  # root -> size of its storage
        for node in graph.nodes:
            self._note(node)
            for leaf, root in zip(tensor_leaves(node), self._facts.roots(node), strict=False):
                self._bytes.setdefault(root, leaf.untyped_storage().nbytes())
            if _returns_first_argument(node):
                self._same[node] = node.args[0]

    def _note(self, node: fx.Node) -> None:
        position = self.position[node]
        written = set(written_by(node))
        for value in node.all_input_nodes:
            access = Access(position, node, value)
            only_written = (
                value in written and node.target is torch.ops.aten.copy_.default and node.args[1] is not value
            )
            for root in self._facts.roots(value):
                if value in written:
                    self._writes[root].append(access)
                if not only_written:
                    self._reads[root].append(access)

    def regions(self, node: fx.Node) -> list[Region]:
        """Where the tensors of ``node`` lie; several where it has several, or may lie in several memories."""
        roots = self._facts.roots(node)
        leaves = tensor_leaves(node)
        ranges = byte_range(leaves[0]) if len(leaves) == 1 and len(roots) == 1 else WHOLE
        return [self._placed(root, *ranges) for root in roots]

    def region(self, node: fx.Node) -> Region | None:
        """Where ``node`` lies, if it is one tensor in one known memory."""
        regions = self.regions(node)
        return regions[0] if len(regions) == 1 and len(tensor_leaves(node)) == 1 and regions[0].root >= 0 else None

    def _placed(self, root: int, start: int, stop: int) -> Region:
        while root in self._shift:
            root, delta = self._shift[root]
            if delta is None or (start, stop) == WHOLE:
                start, stop = WHOLE
            else:
                start, stop = start + delta, stop + delta
        return Region(root, start, stop)

    def is_same(self, first: fx.Node, second: fx.Node) -> bool:
        """Whether two values of equal layout are known to be the very same bytes."""
        if self._original(first) is self._original(second):
            return True
        here, there = self.region(first), self.region(second)
        return here is not None and here == there and (here.start, here.stop) != WHOLE

    def owns_memory(self, node: fx.Node) -> bool:
        """Whether ``node`` is a whole allocation: made as one, or known to span all bytes of it."""
        schema = schema_of(self._original(node))
        if schema is not None and all(result.alias_info is None for result in schema.returns):
            return True
        place = self.region(node)
        return place is not None and (place.start, place.stop) == (0, self._bytes.get(place.root))

    def leaves(self, place: Region) -> bool:
        """Whether an output of the graph lies in bytes of ``place``."""
        return any(access.node.op == "output" for access in self.reads_after(place, -1))

    def _original(self, node: fx.Node) -> fx.Node:
        while node in self._same:
            node = self._same[node]
        return node

    def overlap(self, first: fx.Node, second: fx.Node) -> bool:
        """Whether two values may have a byte in common; assumed where either's memory is unknown."""
        left, right = self.regions(first), self.regions(second)
        if any(region.root < 0 for region in (*left, *right)):
            return bool(left) and bool(right)
        return any(one.overlaps(other) for one in left for other in right)

    def reads_after(self, place: Region, position: int) -> Iterator[Access]:
        """Reads of bytes of ``place`` by nodes later than ``position``, in order."""
        return self._after(self._reads, place, position)

    def writes_after(self, place: Region, position: int) -> Iterator[Access]:
        """Writes to bytes of ``place`` by nodes later than ``position``, in order."""
        return self._after(self._writes, place, position)

    def _after(self, accesses: dict[int, list[Access]], place: Region, position: int) -> Iterator[Access]:
        for root in (place.root, UNKNOWN):
            known = accesses.get(root, [])
            for access in known[bisect_right(known, position, key=_position) :]:
                if root == UNKNOWN or any(region.overlaps(place) for region in self.regions(access.value)):
                    yield access

    def merge(self, value: fx.Node, target: fx.Node) -> None:
        """Record that ``value`` now lies exactly where ``target`` lies, and all that lay in its memory goes with it.

        Accesses before ``value`` are forgotten on both sides: questions come in graph order.
        """
        own, into = self.region(value), self.region(target)
        if own is None or into is None:
            raise ValueError(f"{value.name} or {target.name} has no single known memory")
        known = WHOLE not in {(own.start, own.stop), (into.start, into.stop)}
        self._shift[own.root] = (into.root, into.start - own.start if known else None)
        self._same[value] = target
        now = self.position[value]
        for accesses in (self._reads, self._writes):
            both = accesses.pop(own.root, []) + accesses[into.root]
            accesses[into.root] = sorted((access for access in both if access.position >= now), key=_position)

    def wrote(self, node: fx.Node, value: fx.Node) -> None:
        """Record that ``node``, which had no effect before, now writes ``value``'s memory."""
        region = self.region(value)
        if region is not None:
            insort(self._writes[region.root], Access(self.position[node], node, value), key=_position)


def _position(access: Access) -> int:
    return access.position
