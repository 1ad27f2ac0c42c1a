"""Which captured graphs of one memory pool write where: so that no replay overwrites the results that another one handed out.

Graphs share a pool so that their intermediate values share memory. Memory that one graph used and freed while it was
captured may become the result of a graph that is captured later; a replay of the earlier one then writes over it. The other
way round cannot be: results stay allocated as long as their graph lives.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

import sympy
import torch
from torch import fx

from npugraph_ex.graph.memory.aliases import tensor_leaves

_ATTEMPTS = 3
"""How often a graph is captured anew to have its results elsewhere; one is enough but for kernels with much scratch memory."""

_MOST_BLOCKS = 256
"""How many blocks are taken out of the allocator's way for one result."""

Span = tuple[int, int]
"""Addresses, from the first byte to the one after the last."""


def span_of(storage: torch.UntypedStorage) -> Span:
    """Where a storage lies."""
    start = storage.data_ptr()
    return start, start + storage.nbytes()


class Elsewhere:
    """Keeps the allocator from laying results of a capture where other graphs write.

    Args:
        sizes: the nodes whose values are results, and how many bytes each of these takes.
        others: where no result may lie.
    """

    def __init__(self, sizes: Mapping[fx.Node, Sequence[int]], others: Sequence[Span]) -> None:
        self._sizes = sizes
        self._others = others

    def make_room(self, node: fx.Node) -> list[torch.Tensor]:
        """See to it that what ``node`` allocates lies well.

        Args:
            node: about to run, under capture.

        Returns:
            What to hold until it has run: memory that it could get and must not.
        """
        held: list[torch.Tensor] = []
        good: list[torch.Tensor] = []  # the operator gets these blocks: they are the last that were freed, and fit
        for size in self._sizes.get(node, ()):
            for _ in range(_MOST_BLOCKS):
                block = torch.empty(size, dtype=torch.uint8, device="npu")
                if not _meet(span_of(block.untyped_storage()), self._others):
                    good.append(block)
                    break
                held.append(block)
        return held


class Footprint:
    """Where one captured graph writes.

    Args:
        pool: the memory pool that it was captured into.
        written: everything that its operators returned, with the nodes that did.
        results: what it hands out.
    """

    def __init__(
        self, pool: tuple[int, int], written: Mapping[Span, Sequence[fx.Node]], results: Iterable[Span]
    ) -> None:
        self.pool = pool
        self.written = written
        self._results = frozenset(results)
        with _lock:
            _alive.add(self)

    def is_overwritten(self) -> bool:
        """Whether a replay of another living graph writes over these results."""
        return any(_meet(span, self._results) for span in self._written_by_others())

    def _written_by_others(self) -> list[Span]:
        return _written_in(self.pool, self)

    def elsewhere(self) -> Elsewhere:
        """What another capture of the same graph has to know to have its results where no other graph writes."""
        sizes: dict[fx.Node, list[int]] = {}
        for span in self._results:
            for node in self.written.get(span, ()):
                sizes.setdefault(node, []).append(span[1] - span[0])
        return Elsewhere(sizes, self._written_by_others())

    def result_nodes(self) -> list[fx.Node]:
        """The nodes that returned what is handed out."""
        return [node for span in self._results for node in self.written.get(span, ())]

    def retire(self) -> None:
        """Count no more: the graph will not be replayed."""
        with _lock:
            _alive.discard(self)


def foreseen(
    graph: fx.Graph, nodes: Sequence[fx.Node], inputs: Sequence[object], pool: tuple[int, int]
) -> Elsewhere | None:
    """As `Footprint.elsewhere`, but before a capture: a new size takes one capture and not two.

    Args:
        graph: about to be captured with ``inputs``.
        nodes: which of its nodes returned results in an earlier capture, of other sizes perhaps.
        inputs: the call's.
        pool: the memory pool that the capture will join.
    """
    others = _written_in(pool)
    if not nodes or not others:
        return None
    values = dict(_symbols(graph, inputs))
    return Elsewhere({node: sizes for node in nodes if (sizes := _bytes(node, values))}, others)


def _symbols(graph: fx.Graph, inputs: Sequence[object]) -> Iterator[tuple[sympy.Expr, int]]:
    """What the symbols in the shapes of a graph's inputs stand for in one call."""
    for node, given in zip(graph.find_nodes(op="placeholder"), inputs, strict=True):
        if isinstance(given, torch.Tensor):
            for size, actual in zip(node.meta["val"].shape, given.shape, strict=True):
                if isinstance(size, torch.SymInt):
                    yield size.node.expr, actual


def _bytes(node: fx.Node, values: Mapping[sympy.Expr, int]) -> list[int]:
    """How large the memory of a node's values is, as far as the symbols tell."""
    sizes = [leaf.untyped_storage().nbytes() for leaf in tensor_leaves(node)]
    known = [size if isinstance(size, int) else size.node.expr.xreplace(values) for size in sizes]
    return [int(size) for size in known if isinstance(size, int) or size.is_number]


def _written_in(pool: tuple[int, int], but: Footprint | None = None) -> list[Span]:
    """Where the living graphs of a pool write."""
    with _lock:
        footprints = [footprint for footprint in _alive if footprint is not but and footprint.pool == pool]
    return [span for footprint in footprints for span in footprint.written]


_lock = threading.Lock()

_alive: weakref.WeakSet[Footprint] = weakref.WeakSet()
"""Those of all captured graphs that can still be replayed; callers may put graphs of several functions into one pool."""


def _meet(span: Span, others: Iterable[Span]) -> bool:
    return any(span[0] < stop and start < span[1] for start, stop in others)


class HasFootprint(Protocol):
    """A captured graph, as far as this module knows it."""

    @property
    def footprint(self) -> Footprint:
        """Where it writes."""


Graph = TypeVar("Graph", bound=HasFootprint)


def apart(graph: Graph, capture: Callable[[Elsewhere], Graph]) -> Graph:
    """The graph, or another capture of it, whose results no other graph overwrites; the last one tried where none is found.

    While a capture that will not do is kept, the place of its results is taken, so the next one gets another.

    Args:
        graph: just captured, and not replayed yet.
        capture: captures it again, with the results elsewhere.
    """
    unfit: list[Graph] = []
    while graph.footprint.is_overwritten() and len(unfit) < _ATTEMPTS:
        graph.footprint.retire()
        unfit.append(graph)
        graph = capture(graph.footprint.elsewhere())
    return graph
