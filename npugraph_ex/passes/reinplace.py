"""Makes operators write into memory that is no longer needed: that of an argument, or of an input that the graph overwrites.

`y = relu(x)` becomes `relu_(x)` when nothing reads the bytes of `x` afterwards. For an input that the graph writes, AOT
ends with `copy_(input, value)`; when the value can be computed in the input's own memory, that copy disappears, which
restores the in-place operators that the user wrote.

A destination qualifies only if

* the result has its shape, dtype, strides and device;
* no later node reads any of its bytes through any alias, and no output of the graph does, unless the bytes are written again
  first, or the reader can run earlier (`earlier_readers`);
* no other argument of the operator lies in its bytes (`a + a.t()`);
* every later write to these bytes comes after the last read of the result;
* if the result is an output, the destination is a whole allocation, so that an output's memory is no larger than in eager
  mode;
* it is no input, or an input that the graph itself overwrites afterwards;
* the in-place overload has a kernel on the device.

With several streams the node list is not the order of execution. Then two more facts must be proven: all earlier accesses to
the destination are over before the operator, and all later writes to it come after all uses of the result. An operator that
writes only a part of the destination needs this only for that part, because a program may write disjoint parts on several
streams without an event.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container
from dataclasses import dataclass

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx.experimental.symbolic_shapes import statically_known_true

from npugraph_ex.graph.inplace import inplace_overload
from npugraph_ex.graph.memory.aliases import AliasFacts, counted_storages, tensor_leaves, written_by
from npugraph_ex.graph.memory.history import MemoryAccess
from npugraph_ex.graph.memory.memory_map import MemoryMap
from npugraph_ex.graph.memory.regions import UNKNOWN, Region
from npugraph_ex.graph.metadata import derive, difference, fake_mode_of
from npugraph_ex.graph.parts import SCATTERS, is_made_copy, part_written
from npugraph_ex.graph.streams.events import computes, has_several_streams, producers, stream_of
from npugraph_ex.graph.streams.order import Order
from npugraph_ex.passes.base import PassContext
from npugraph_ex.passes.earlier_readers import EarlierReaders

_aten = torch.ops.aten


@dataclass
class _Reinplacer:
    """The pass over one graph, for one kind of destination."""

    graph: fx.Graph
    memory: MemoryMap
    inputs: bool  # destinations are inputs that the graph overwrites; otherwise intermediates
    order: Order | None  # None if there is one stream, which runs in list order
    made_copies: bool = False  # only copies that unwrapping made

    def __post_init__(self) -> None:
        # Computed before the first rewrite, because a view of moved memory looks like a copy until its metadata is refreshed.
        self._computing = {node for node in self.graph.nodes if computes(node)}
        self._counted = counted_storages(self.graph)
        self._readers = EarlierReaders(self.graph, self.memory)

    def run(self) -> None:
        for node in list(self.graph.nodes):
            if node.op != "call_function" or not isinstance(node.target, OpOverload) or not node.args:
                continue
            target = node.args[0]
            if not isinstance(target, fx.Node) or not self._is_candidate(node):
                continue
            if self._may_overwrite(node, target) or self._may_overwrite_once_read(node, target):
                self._rewrite(node, target)

    def _is_candidate(self, node: fx.Node) -> bool:
        if node in self._readers:
            return False
        if self.made_copies:
            return is_made_copy(node)
        return (
            node.target in SCATTERS or node.target is _aten.clone.default or inplace_overload(node.target) is not None
        )

    def _may_overwrite_once_read(self, node: fx.Node, target: fx.Node) -> bool:
        """Whether ``node`` may do so once later readers of ``target`` have moved before it; then they have."""
        region = self.memory.region(target)
        if region is None or self.order is not None or self.inputs or self.made_copies:
            return False
        readers = self._readers.of(node, target, region)
        if not readers or not self._may_overwrite(node, target, readers):
            return False
        self._readers.move(readers, node)
        return True

    def _may_overwrite(self, node: fx.Node, target: fx.Node, moving: Container[fx.Node] = ()) -> bool:
        """Whether ``node`` may compute its result in the memory of ``target``, once the nodes of ``moving`` run before it."""
        region, own = self.memory.region(target), self.memory.region(node)
        if region is None or own is None or region.root == own.root or not _same_layout(node, target):
            return False
        if (region.root in self.memory.inputs) != self.inputs:
            return False
        position = self.memory.position[node]
        return (
            (self._is_needless(node, target, own, region) or self._replaces(node, target, region, position, moving))
            and (not self.inputs or self.memory.written_anew(region, position) is not None)
            and (not self.memory.leaves(own) or self.memory.owns_memory(target))
            and self._result_is_done_before(own, next(self.memory.writes_after(region, position), None), position)
            and self._is_ordered(node, target, region)
            and self._begins_alike(node, target, own)
        )

    def _replaces(
        self, node: fx.Node, target: fx.Node, region: Region, position: int, moving: Container[fx.Node]
    ) -> bool:
        """Whether nothing else needs the contents that ``node`` would overwrite."""
        return self._only_target_is_there(node, target) and self._is_unread(node, region, position, moving)

    def _is_needless(self, node: fx.Node, target: fx.Node, own: Region, region: Region) -> bool:
        """Whether ``node`` copies nothing anew, and nobody could tell its result from the destination."""
        if not self._changes_nothing(node, target) or any(self.memory.writes_after(own, self.memory.position[node])):
            return False
        return not (self.memory.leaves(own) and self.memory.leaves(region))

    def _changes_nothing(self, node: fx.Node, target: fx.Node) -> bool:
        """Whether ``node`` is `copy(target, values)` of values that were computed in the destination already."""
        values = node.args[1] if node.target is _aten.copy.default else None
        return isinstance(values, fx.Node) and self._is_copied_to_itself(node, values, target)

    def _begins_alike(self, node: fx.Node, target: fx.Node, own: Region) -> bool:
        """Whether a node that counts from the beginning of the result's storage finds the same elements in the destination's."""
        if not any(region.root == own.root for value in self._counted for region in self.memory.regions(value)):
            return True
        if self.inputs:  # a value that the program wrote into the input means the input's storage; another one its own
            write = next(self.memory.writes_after(self.memory.regions(target)[0], self.memory.position[node]))
            return any(self.memory.overlap(value, node) for value in write.node.all_input_nodes)
        return self.memory.begins_as(node, target)

    def _is_unread(self, node: fx.Node, region: Region, position: int, moving: Container[fx.Node]) -> bool:
        """Whether no later node reads the destination's present contents; for an input, no node before the next write."""
        reads = self.memory.reads_after(region, position)
        reads = (read for read in reads if read.node not in moving)
        read = next((read for read in reads if not self._puts_back(read.node, node, region)), None)
        if read is None or not self.inputs:
            return read is None
        anew = self.memory.written_anew(region, position)
        return anew is not None and anew < read.position

    def _puts_back(self, outer: fx.Node, node: fx.Node, region: Region) -> bool:
        """Whether an outer scatter writes the part ``node`` and only reads the bytes around it."""
        if outer.target not in SCATTERS or node.target not in SCATTERS or outer.args[1] is not node:
            return False
        return region.is_exact and self.memory.region_of(part_written(outer, fake_mode_of(self.graph))) == region

    def _only_target_is_there(self, node: fx.Node, target: fx.Node) -> bool:
        """Whether ``node`` reads the destination's bytes as its first argument and in no other way."""
        others = [other for other in node.all_input_nodes if other is not target and self.memory.overlap(other, target)]
        if not all(self._is_copied_to_itself(node, other, target) for other in others):
            return False
        return _times_given(node, target) == 1

    def _is_copied_to_itself(self, node: fx.Node, values: fx.Node, target: fx.Node) -> bool:
        """Whether ``node`` is `copy(target, values)` and the values were computed in the destination already."""
        return (
            node.target is _aten.copy.default
            and self.memory.is_same(values, target)
            and difference(_value(target), _value(values)) is None
        )

    def _result_is_done_before(self, own: Region, first: MemoryAccess | None, position: int) -> bool:
        """Whether nothing reads or writes the result after ``first``, if given, overwrites the destination."""
        if first is None:
            return True
        late = [*self.memory.reads_after(own, position), *self.memory.writes_after(own, position)]
        for access in late:
            if access.position > first.position:
                return False
            if access.position == first.position and not _copies_whole(access, first):
                return False
        return True

    def _is_ordered(self, node: fx.Node, target: fx.Node, region: Region) -> bool:
        """Whether events order ``node`` with every access to the destination in the same way as the list."""
        if self.order is None:
            return True
        position = self.memory.position[node]
        overwrites = list(self.memory.writes_after(region, position))
        accesses = [access for access in self.memory.accesses(target) if access.position < position]
        if node.target in SCATTERS:
            part = part_written(node, fake_mode_of(self.graph))
            accesses = [access for access in accesses if not self.memory.is_apart(access, part)]
        earlier = [access.node for access in accesses] + producers(target, self._computing)
        late = [node, *(access.node for access in self.memory.accesses(node) if access.position > position)]
        return all(self.order.proves(one, node) for one in earlier if computes(one) and one is not node) and all(
            self.order.proves(use, overwrite.node)
            for overwrite in overwrites
            for use in late
            if computes(use) and use is not overwrite.node
        )

    def _rewrite(self, node: fx.Node, target: fx.Node) -> None:
        same = node.target is _aten.clone.default or self._changes_nothing(node, target)
        self.memory.merge(node, target)
        if same:
            node.replace_all_uses_with(target)
            self.graph.erase_node(node)
            return
        if node.target in SCATTERS:
            self._write_part(node, target)
            return
        overload = inplace_overload(node.target)
        if overload is None:  # _is_candidate checks the same
            return
        node.target = overload
        self.memory.wrote(node, target)

    def _write_part(self, node: fx.Node, target: fx.Node) -> None:
        """Replace a scatter by a view of the base and a copy into the view; later nodes use the base itself."""
        _, given, *where = node.args
        source = self._what_is_copied(given, node, target)
        with self.graph.inserting_before(node):
            part = self.graph.call_function(SCATTERS[node.target], (target, *where), dict(node.kwargs))
            copy = self.graph.call_function(_aten.copy_.default, (part, source))
        for new in (part, copy):
            new.meta = {key: value for key, value in node.meta.items() if key not in {"val", "tensor_meta"}}
            self.memory.position[new] = self.memory.position[node]
        part.meta["val"] = derive(part, fake_mode_of(self.graph))
        copy.meta["val"] = part.meta["val"]  # it returns what it writes
        self.memory.add(part)
        self.memory.no_longer_reads(node, target)
        self.memory.wrote(node, part)
        node.replace_all_uses_with(target)
        self.graph.erase_node(node)
        if source is not given and isinstance(given, fx.Node) and not given.users:
            self.graph.erase_node(given)

    def _what_is_copied(self, source: fx.node.Argument, node: fx.Node, target: fx.Node) -> fx.node.Argument:
        """Skip the functional `copy(base, values)` that AOT writes for an assignment: a copy of `values` does the same.

        Do not skip it if the values lie in the written bytes, as in `x[1:] = x[:-1].clone()`, because there it separates the
        two, nor if it has moved to where their memory still has them.
        """
        if not isinstance(source, fx.Node) or source.target is not _aten.copy.default or len(source.args) != 2:
            return source
        values = source.args[1]
        if not isinstance(values, fx.Node) or tensor_leaves(source)[0].dtype != tensor_leaves(node)[0].dtype:
            return source
        if source in self._readers or self.memory.overlap(values, self._part(source.args[0], node, target)):
            return source
        start, stop = self.memory.position[source], self.memory.position[node]
        if self.order is not None:
            if stream_of(source) != stream_of(node):
                return source
            stop = len(self.memory.position)  # a write later in the list may run first
        writes = (next(self.memory.writes_after(region, start), None) for region in self.memory.regions(values))
        return source if any(write is not None and write.position < stop for write in writes) else values

    def _part(self, view: fx.node.Argument, node: fx.Node, target: fx.Node) -> fx.Node:
        """The part of ``target`` that a scatter writes: ``view`` if that is exactly the part, or the whole target."""
        if not isinstance(view, fx.Node) or view.target is not SCATTERS[node.target]:
            return target
        base, *where = view.args
        alike = (where, view.kwargs) == ([*node.args[2:]], node.kwargs)
        return view if alike and isinstance(base, fx.Node) and self.memory.is_same(base, target) else target


def _times_given(node: fx.Node, value: fx.Node) -> int:
    """How many arguments of ``node`` are ``value``; `index_put(x, [x], y)` takes it inside a list as well."""
    arguments = (*node.args, *node.kwargs.values())
    return sum(given.count(value) if isinstance(given, (list, tuple)) else given is value for given in arguments)


def _same_layout(node: fx.Node, target: fx.Node) -> bool:
    """Whether the result is a tensor like the destination and no two of its elements share memory."""
    new, old = tensor_leaves(node), tensor_leaves(target)
    if len(new) != 1 or len(old) != 1 or difference(old[0], new[0]) is not None:
        return False
    return all(  # no guard: a size that depends on data cannot have one
        statically_known_true(size == 1) or statically_known_true(stride != 0)
        for size, stride in zip(old[0].size(), old[0].stride(), strict=True)
    )


def _copies_whole(read: MemoryAccess, write: MemoryAccess) -> bool:
    """Whether one node reads the result and overwrites the destination in equal layout, as `copy_(x, y)` does."""
    node = write.node
    return (
        read.node is node
        and node.target is _aten.copy_.default
        and node.args[0] is write.value
        and node.args[1] is read.value
        and _same_layout(read.value, write.value)
    )


def remove_self_copies(graph: fx.Graph, memory: MemoryMap) -> None:
    """Remove every `copy_(x, y)` whose two sides are the same bytes in the same layout."""
    writers: _Writers | None = None
    for node in graph.find_nodes(op="call_function", target=_aten.copy_.default):
        destination, source = node.args[:2]
        if not isinstance(source, fx.Node) or not isinstance(destination, fx.Node) or destination not in memory:
            continue
        if difference(_value(destination), _value(source)) is not None or not memory.is_same(destination, source):
            continue
        writers = writers or _Writers(graph)
        if memory.is_input(destination) and not writers.others_write(node):
            continue  # `x.copy_(x.clone())`: callers rely on the fact that the graph writes this input
        writers.forget(node)
        node.replace_all_uses_with(destination)
        graph.erase_node(node)


class _Writers:
    """The writers by written memory, so that a look-up for one copy does not visit all others."""

    def __init__(self, graph: fx.Graph) -> None:
        self._facts = AliasFacts(graph)
        self._by_root: dict[int, list[fx.Node]] = defaultdict(list)
        for writer in self._facts.writers:
            for root in self._roots(writer):
                self._by_root[root].append(writer)

    def _roots(self, writer: fx.Node) -> set[int]:
        return {region.root for region in self._facts.writes(writer)}

    def forget(self, writer: fx.Node) -> None:
        """Forget a node before it is erased."""
        for root in self._roots(writer):
            self._by_root[root].remove(writer)

    def others_write(self, copy: fx.Node) -> bool:
        """Whether a node other than ``copy`` writes the same memory."""
        roots = self._roots(copy)
        asked = self._by_root if UNKNOWN in roots else (*roots, UNKNOWN)
        written = written_by(copy)
        return any(
            writer is not copy and self._facts.touches(writer, written)
            for root in asked
            for writer in self._by_root.get(root, ())
        )


def _value(node: fx.Node) -> object:
    return node.meta.get("val")


def _run(gm: fx.GraphModule, *, inputs: bool, made_copies: bool = False) -> None:
    order = Order(gm.graph) if has_several_streams(gm.graph) else None
    memory = MemoryMap(gm.graph)
    _Reinplacer(gm.graph, memory, inputs, order, made_copies).run()
    remove_self_copies(gm.graph, memory)


def run_made_copies(gm: fx.GraphModule, context: PassContext) -> None:
    """Without `inplace_pass`: no copies for operators that write in place by themselves, as the program called them."""
    if not context.options.inplace_pass and any(map(is_made_copy, gm.graph.nodes)):
        _run(gm, inputs=False, made_copies=True)


def run_intermediates(gm: fx.GraphModule, context: PassContext) -> None:
    """The pass for memory that the graph itself allocated."""
    del context
    _run(gm, inputs=False)


def run_inputs(gm: fx.GraphModule, context: PassContext) -> None:
    """The pass for inputs that the graph overwrites."""
    del context
    _run(gm, inputs=True)
