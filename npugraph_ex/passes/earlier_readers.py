"""Moves the last small readers of a value before the operator that can then write in the value's memory.

In `y = exp(x); z = -x[0]` the row is read after `exp`, so `exp` needs memory of its own beside all of `x`. If the row is read
first, `exp` works in place, and the result of the row is all that lives longer.

A reader moves only if

* the graph has one stream, and neither events nor collectives;
* it has no effect, draws no random numbers, and its operator is of torch or torch_npu, whose schemas say what they do;
* what it takes is there before the operator, or is a view of something that is and can be made before it too;
* nothing writes what it reads between its new place and its old one;
* the results of all readers are smaller than the value, also as the allocator rounds them, whatever the sizes are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx.experimental.symbolic_shapes import statically_known_true

from npugraph_ex.graph.effects import draws_random_numbers, has_effect, orders_work
from npugraph_ex.graph.memory.aliases import tensor_leaves
from npugraph_ex.graph.memory.memory_map import MemoryMap
from npugraph_ex.graph.memory.regions import Region
from npugraph_ex.graph.streams.events import computes
from npugraph_ex.graph.undeclared import is_foreign

_MOST = 4
"""How many readers move before one operator; more are rarely small, and each is a search."""
_BLOCK = 512
"""torch_npu's allocator gives blocks of a multiple of so many bytes."""


@dataclass
class EarlierReaders:
    """The readers of one graph that may move.

    Args:
        graph: the graph.
        memory: its accesses to memory.
    """

    graph: fx.Graph
    memory: MemoryMap
    _moved: set[fx.Node] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._has_order = any(map(orders_work, self.graph.nodes))

    def __contains__(self, node: fx.Node) -> bool:
        """Whether ``node`` has moved. Its neighbours share its position, so the positions do not say what it may overwrite."""
        return node in self._moved

    def of(self, node: fx.Node, target: fx.Node, region: Region) -> list[fx.Node]:
        """What must move before ``node``, in order, so that no later node reads ``target``; empty if that may not be.

        Args:
            node: the operator that could write in place.
            target: the value in whose memory.
            region: of ``target``.
        """
        if self._has_order:
            return []
        position = self.memory.position[node]
        reads = islice(self.memory.reads_after(region, position), 2 * _MOST)
        readers = list(dict.fromkeys([read.node for read in reads]))
        if not readers or len(readers) > _MOST:
            return []
        moving: dict[fx.Node, None] = {}
        if not all(self._may_move(reader, position, moving) for reader in readers):
            return []
        return list(moving) if _is_smaller(filter(computes, moving), target) else []

    def _may_move(self, reader: fx.Node, position: int, moving: dict[fx.Node, None]) -> bool:
        """Whether ``reader`` may run at ``position``; adds it to ``moving``, after the views that it needs there."""
        if reader in moving:
            return True
        if not isinstance(reader.target, OpOverload) or is_foreign(reader.target):
            return False
        if has_effect(reader) or draws_random_numbers(reader):
            return False
        for given in reader.all_input_nodes:
            if self.memory.position[given] < position:
                continue
            if computes(given) or not self._may_move(given, position, moving):
                return False
        if self._is_written_between(reader, position):
            return False
        moving[reader] = None
        return True

    def _is_written_between(self, reader: fx.Node, position: int) -> bool:
        """Whether a node writes what ``reader`` takes, between ``position`` and the reader."""
        regions = (region for given in reader.all_input_nodes for region in self.memory.regions(given))
        writes = (next(self.memory.writes_after(region, position), None) for region in regions)
        return any(write is not None and write.position < self.memory.position[reader] for write in writes)

    def move(self, readers: list[fx.Node], node: fx.Node) -> None:
        """Move what `of` has found before ``node``."""
        for reader in readers:
            node.prepend(reader)
            self.memory.moved_before(reader, node)
            self._moved.add(reader)


def _is_smaller(readers: Iterable[fx.Node], target: fx.Node) -> bool:
    """Whether the results of ``readers`` take less memory than ``target``, at whatever size."""
    room, sizes = _bytes(target), list(map(_bytes, readers))
    if not all(isinstance(size, int) for size in (room, *sizes)):
        return statically_known_true(sum(size + _BLOCK - 1 for size in sizes) <= room)
    return bool(sum(sizes) < room) and sum(-(-size // _BLOCK) for size in sizes) <= -(-room // _BLOCK)


def _bytes(node: fx.Node) -> int | torch.SymInt:
    """The bytes of the elements of a node's tensors."""
    return sum(leaf.numel() * leaf.element_size() for leaf in tensor_leaves(node))
