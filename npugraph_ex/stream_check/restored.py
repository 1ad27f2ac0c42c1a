"""The nodes' touches in the program before functionalization gave writes in place a functional form.

AOT makes `x[4:].copy_(y)` a `slice_scatter`, which reads all of `x` and returns new memory. Two streams that write disjoint
halves of one buffer then depend on each other, although no line of the program says so. To find the races of the program
itself, this module moves each functional write back into the memory that the program wrote.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from npugraph_ex.graph.memory.aliases import is_view, read_by, tensor_leaves, written_by
from npugraph_ex.graph.memory.history import MemoryAccess
from npugraph_ex.graph.memory.memory_map import MemoryMap
from npugraph_ex.graph.memory.regions import Region
from npugraph_ex.graph.metadata import difference, executed, fake_mode_of
from npugraph_ex.graph.parts import is_made_copy, part_written, writes_a_part, writes_by_index
from npugraph_ex.stream_check.accesses import Touch, Touches, is_dense, works


class Restored:
    """The accesses of a graph with its functional writes moved back. False if the graph has none.

    A functional write is moved back if nothing reads the old contents later; after AOT nothing does. That also holds if its
    result has other strides than the written memory, as a part of a part may. If something does read the old contents later,
    the write changes only its part of new memory; the rest is a copy that the program does not make. So every access counted
    here is one of the program's.

    Args:
        graph: its nodes carry fake tensors in ``meta["val"]``. It is not changed.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._into: dict[fx.Node, fx.Node] = {}  # functional write -> the value whose memory it writes; itself, if new
        self._base: dict[fx.Node, fx.Node] = {}  # functional write moved back -> the value that the program wrote
        self._made_of: dict[int, fx.Node] = {}  # memory -> the functional write that computes it, if it has a copy
        writes = [node for node in graph.nodes if _is_functional_write(node)]
        if not writes:
            return
        self._memory = MemoryMap(graph)
        self._touches = Touches(self._memory)
        self._mode = fake_mode_of(graph)
        for node in writes:
            target = node.args[0]
            if isinstance(target, fx.Node):
                self._put_back(node, target)
        self._roots = {region.root for node in self._into for region in self._memory.regions(node)}
        self._roots |= {region.root for node in self._into.values() for region in self._memory.regions(node)}

    def __bool__(self) -> bool:
        return bool(self._into)

    def _put_back(self, node: fx.Node, target: fx.Node) -> None:
        old, new = self._memory.region(target), self._memory.region(node)
        if old is None or new is None or old.root == new.root:
            return
        self._into[node] = target
        self._made_of[new.root] = node
        if self._is_needed_later(node, old):
            self._into[node] = node
            del self._made_of[new.root]
        elif difference(target.meta["val"], node.meta["val"]) is None:
            del self._made_of[new.root]
            self._memory.merge(node, target)
            self._base[node] = self._base.get(target, target)

    def _is_needed_later(self, node: fx.Node, old: Region) -> bool:
        """Whether a node reads the old contents that ``node`` leaves, before all of them are overwritten."""
        position = self._memory.position[node]
        again = [self._memory.written_anew(old, position)]
        again += [write.position for write in self._memory.writes_after(old, position) if self._copies_back(write.node)]
        anew = min((found for found in again if found is not None), default=None)
        return any(
            (works(access.node) or access.node.op == "output") and not self._overwrites(access, node, old)
            for access in self._memory.reads_after(old, position)
            if anew is None or access.position <= anew
        )

    def _copies_back(self, node: fx.Node) -> bool:
        """Whether ``node`` copies the result of a functional write into the memory that the program wrote."""
        if node.target is not torch.ops.aten.copy_.default:
            return False
        target, source = node.args[:2]
        if not isinstance(target, fx.Node) or not isinstance(source, fx.Node):
            return False
        part = target.meta["val"]
        return self._is_put_back(source, part) or (self._memory.is_same(source, target) and self._lies_at(source, part))

    def _overwrites(self, access: MemoryAccess, write: fx.Node, region: Region) -> bool:
        """Whether a read is by an outer scatter (a view of a view), which reads everything except the part that ``write`` makes."""
        node = access.node
        if not writes_a_part(node) or access.value is not node.args[0]:
            return False
        part = self._memory.region_of(part_written(node, self._mode))
        return node.args[1] is write or (part == region and region.is_exact)

    def roots(self, node: fx.Node) -> frozenset[int]:
        """As `AliasFacts.roots`."""
        return frozenset(region.root for region in self._memory.regions(node))

    def of(self, node: fx.Node) -> list[Touch]:
        """As `Touches.of`."""
        into = self._into.get(node)
        if self._copies_back(node):
            return []
        if is_made_copy(node) and into is not None:
            return []
        if writes_by_index(node):
            base: Any = node.args[0] if into is None else into
            region = self._memory.region(base)
            if region is not None and region.root in self._roots:
                return [*self._sources(node), self._write(base, region, None)]
        if into is None:
            return [self._marked(touch) for touch in self._touches.of(node)]
        part = part_written(node, self._mode, into)
        if into is not node and (self._lies_at(node.args[1], part) or self._is_put_back(node.args[1], part)):
            return []  # an outer part, whose inner part is already written
        return [*self._sources(node), self._write(into, self._memory.region_of(part), part)]

    def _sources(self, node: fx.Node) -> list[Touch]:
        """The reads of a write, apart from the memory that it changes."""
        target, *others = node.args
        read = [value for value in read_by(node) if value is not target or value in others]
        return [self._marked(touch) for value in read for touch in self._touches.of_value(value)]

    def _write(self, into: fx.Node, region: Region, part: torch.Tensor | None) -> Touch:
        """A write into a part; None if its bytes in ``region`` are unknown."""
        return Touch(
            self._base.get(into, into), region, part, is_dense(region, part), writes=True, restored=True, whole=False
        )

    def _lies_at(self, value: Any, part: torch.Tensor) -> bool:
        """Whether a value has exactly the bytes of a part."""
        if not isinstance(value, fx.Node):
            return False
        there = self._memory.region(value)
        if there != self._memory.region_of(part) or difference(tensor_leaves(value)[0], part) is not None:
            return False
        return there.is_exact or value in self._base

    def _is_put_back(self, value: Any, part: torch.Tensor) -> bool:
        """Whether a value is exactly a part of a functional write, or a view of one, with other strides than the memory.

        It applies the result's views to the written memory, to find their bytes.
        """
        region = self._memory.region(value) if isinstance(value, fx.Node) else None
        write = None if region is None else self._made_of.get(region.root)
        if write is None:
            return False
        views = []
        while value is not write:
            if not is_view(value) or not isinstance(value.args[0], fx.Node):
                return False
            views.append(value)
            value = value.args[0]
        seen = self._into[write].meta["val"]
        for view in reversed(views):
            try:
                seen = executed(view.target, (seen, *view.args[1:]), view.kwargs, self._mode)
            except RuntimeError:
                return False  # the written memory has no such view
        there = self._memory.region_of(seen)
        return there.is_exact and there == self._memory.region_of(part) and difference(seen, part) is None

    def _marked(self, touch: Touch) -> Touch:
        """A touch of memory with functional writes moved back, under the name that all versions of a value share."""
        if touch.region.root not in self._roots:
            return touch
        return touch._replace(value=self._base.get(touch.value, touch.value), restored=True)


def _is_functional_write(node: fx.Node) -> bool:
    return writes_a_part(node) or is_made_copy(node) or (writes_by_index(node) and not written_by(node))
