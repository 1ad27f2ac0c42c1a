"""The accesses to memory so far in a walk through a graph, to find those that conflict.

`graph.memory.aliases` gives the memory of values and the reads and writes of nodes; this module adds the order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import zip_longest
from typing import NamedTuple

import torch
from torch import fx

from npugraph_ex.graph.memory.aliases import AliasFacts, reaches_beyond, read_by, schema_of, tensor_leaves, written_by
from npugraph_ex.graph.memory.memory_map import MemoryMap
from npugraph_ex.graph.memory.regions import UNKNOWN, Region
from npugraph_ex.graph.memory.strides import share_no_byte
from npugraph_ex.graph.streams.events import computes
from npugraph_ex.graph.streams.order import Moment


class Touch(NamedTuple):
    """Bytes of one tensor that a node reads or writes."""

    value: fx.Node
    region: Region
    tensor: torch.Tensor | None
    is_dense: bool
    """Whether it touches every byte of the region."""
    writes: bool = False
    fresh: bool = False
    """Whether the node allocates this memory."""
    restored: bool = False
    """Whether the memory is that of the program before functionalization: see `restored`."""
    whole: bool = True
    """Whether it may be all of ``value``; otherwise it is a part, although the region may not show that."""

    def conflicts(self, other: Touch) -> bool:
        """Whether the two may have a byte in common and one of them writes."""
        if not (self.writes or other.writes) or not self.region.overlaps(other.region):
            return False
        if self.tensor is None or other.tensor is None or not (self.region.is_exact and other.region.is_exact):
            return not (self.restored and other.restored) or self._includes(other) or other._includes(self)
        if self.is_dense and other.is_dense:
            return True
        return not share_no_byte(self.tensor, other.tensor, starts=(self.region.start, other.region.start))

    def _includes(self, other: Touch) -> bool:
        """Whether every byte of ``other`` is known to be in this touch."""
        return (self.whole and self.value is other.value) or (self.is_dense and self.region.covers(other.region))

    def stands_for(self, earlier: Touch) -> bool:
        """Whether everything that conflicts with ``earlier`` also conflicts with this touch."""
        return (self.writes or not earlier.writes) and self._includes(earlier)


class Past(NamedTuple):
    """A touch and its moment."""

    node: fx.Node
    touch: Touch
    moment: Moment


def works(node: fx.Node) -> bool:
    """Whether ``node`` starts work that reads or writes memory; a query of a size does not."""
    schema = schema_of(node)
    return computes(node) and (bool(tensor_leaves(node)) or schema is None or schema.is_mutable)


class Touches:
    """What each node of a graph reads and writes.

    Args:
        facts: the memory of the graph's values.
    """

    def __init__(self, facts: AliasFacts | MemoryMap) -> None:
        self._facts = facts
        self._tensors: dict[fx.Node, tuple[Touch, ...]] = {}

    def of(self, node: fx.Node) -> list[Touch]:
        """The touches of ``node``: its reads, its writes in place, then its writes into new memory."""
        found = [touch for value in read_by(node) for touch in self.of_value(value)]
        if reaches_beyond(node):
            # All of the storage, in the name of no value that a later touch of this argument could cover.
            found = [Touch(node, Region(touch.region.root), None, is_dense=False) for touch in found]
        found += [touch._replace(writes=True) for value in written_by(node) for touch in self.of_value(value)]
        given = {touch.region.root for argument in node.all_input_nodes for touch in self.of_value(argument)}
        results = self.of_value(node)
        return found + [touch._replace(writes=True, fresh=True) for touch in results if touch.region.root not in given]

    def of_value(self, value: fx.Node) -> tuple[Touch, ...]:
        """A read of each tensor of ``value``, unless it has no byte."""
        if value not in self._tensors:
            pairs = zip_longest(self._facts.regions(value), tensor_leaves(value))
            self._tensors[value] = tuple(
                Touch(value, region, tensor, is_dense(region, tensor))
                for region, tensor in pairs
                if region is not None and not _is_empty(tensor)
            )
        return self._tensors[value]


def is_dense(region: Region, tensor: torch.Tensor | None) -> bool:
    """Whether a tensor touches every byte of its region."""
    if tensor is None or not region.is_exact:
        return False
    return region.stop - region.start == tensor.numel() * tensor.element_size()


def _is_empty(tensor: torch.Tensor | None) -> bool:
    """Whether a tensor is known to have no byte."""
    return tensor is not None and any(type(size) is int and size == 0 for size in tensor.size())


class TouchHistory:
    """The touches of a walk so far, without those that a later one covers."""

    def __init__(self) -> None:
        self._past: dict[int, list[Past]] = defaultdict(list)

    def conflicting(self, touch: Touch) -> Iterator[Past]:
        """The earlier touches that conflict with ``touch``, ordered or not."""
        for past in self._about(touch.region.root):
            if touch.conflicts(past.touch):
                yield past

    def note(self, node: fx.Node, touch: Touch, moment: Moment) -> None:
        """Add a touch of ``node`` at ``moment``; remove touches that it covers."""
        root = touch.region.root
        self._past[root] = [
            past
            for past in self._past[root]
            if not (_is_over(past.moment, moment) and touch.stands_for(past.touch) and past.node is not node)
        ]
        self._past[root].append(Past(node, touch, moment))

    def writers(self, roots: frozenset[int]) -> Iterator[Past]:
        """The writes so far to any of some memories."""
        for root in roots:
            yield from (past for past in self._past.get(root, ()) if past.touch.writes)

    def _about(self, root: int) -> Iterator[Past]:
        if root == UNKNOWN:
            for known in list(self._past.values()):
                yield from known
            return
        yield from self._past.get(root, ())
        yield from self._past.get(UNKNOWN, ())


def _is_over(earlier: Moment, later: Moment) -> bool:
    return later.clock.get(earlier.stream, 0) >= earlier.number
