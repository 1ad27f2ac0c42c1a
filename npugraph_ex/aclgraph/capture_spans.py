"""The addresses that the captures of one memory pool write: no replay may overwrite results of another capture.

Captures share a pool so that their intermediate values share memory. Memory that one capture used and freed may become
the result of a later capture; a replay of the earlier one then overwrites it. The reverse cannot happen: results stay
allocated as long as their capture lives.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

import sympy
import torch
from torch import fx

from npugraph_ex.aclgraph.capture_pool import PoolHandle
from npugraph_ex.graph.memory.aliases import tensor_leaves

_MAX_RECAPTURES = 3
"""How often a graph is captured again to move its results; once is enough except for kernels with much scratch memory."""

_MAX_BLOCKS = 256
"""How many unsuitable blocks of the allocator are occupied for one result."""

Span = tuple[int, int]
"""Addresses, from the first byte to the one after the last."""


def span_of(storage: torch.UntypedStorage) -> Span:
    """The addresses of a storage."""
    start = storage.data_ptr()
    return start, start + storage.nbytes()


class AvoidSpans:
    """Keeps the allocator from placing results of a capture at addresses that other captures write.

    Args:
        sizes: the nodes that return results, and the bytes of each of their results.
        spans: addresses where no result may lie.
    """

    def __init__(self, sizes: Mapping[fx.Node, Sequence[int]], spans: Sequence[Span]) -> None:
        self._sizes = sizes
        self._spans = spans

    def occupy(self, node: fx.Node) -> list[torch.Tensor]:
        """Occupy the blocks that ``node`` could get for its results and must not get.

        Args:
            node: about to run, under capture.

        Returns:
            The occupied blocks. Hold them until the node has run.
        """
        occupied: list[torch.Tensor] = []
        suitable: list[torch.Tensor] = []  # the operator gets these blocks: they are freed last, and fit
        for size in self._sizes.get(node, ()):
            for _ in range(_MAX_BLOCKS):
                block = torch.empty(size, dtype=torch.uint8, device="npu")
                if not _overlaps(span_of(block.untyped_storage()), self._spans):
                    suitable.append(block)
                    break
                occupied.append(block)
        return occupied


class CaptureSpans:
    """The addresses that one capture writes.

    Args:
        pool: the memory pool of the capture.
        written: the memory of everything that its operators returned, with the nodes that returned it.
        results: the memory of its results.
    """

    def __init__(self, pool: PoolHandle, written: Mapping[Span, Sequence[fx.Node]], results: Iterable[Span]) -> None:
        self.pool = pool
        self.written = written
        self._results = frozenset(results)
        with _lock:
            _alive.add(self)

    def has_overwritten_results(self) -> bool:
        """Whether a replay of another living capture writes over these results."""
        return any(_overlaps(span, self._results) for span in _written_in(self.pool, self))

    def avoid_spans(self) -> AvoidSpans:
        """What another capture of the same graph needs, to have its results where no other capture writes."""
        sizes: dict[fx.Node, list[int]] = {}
        for span in self._results:
            for node in self.written.get(span, ()):
                sizes.setdefault(node, []).append(span[1] - span[0])
        return AvoidSpans(sizes, _written_in(self.pool, self))

    def result_nodes(self) -> list[fx.Node]:
        """The nodes that returned the results."""
        return [node for span in self._results for node in self.written.get(span, ())]

    def retire(self) -> None:
        """Leave these addresses out of account: the capture will not be replayed."""
        with _lock:
            _alive.discard(self)


def predict_avoid_spans(
    graph: fx.Graph, nodes: Sequence[fx.Node], inputs: Sequence[object], pool: PoolHandle
) -> AvoidSpans | None:
    """As `CaptureSpans.avoid_spans`, but before a capture: a new size then takes one capture and not two.

    Args:
        graph: about to be captured with ``inputs``.
        nodes: those of its nodes that returned results in an earlier capture, of other sizes perhaps.
        inputs: the call's.
        pool: the memory pool that the capture will join.
    """
    others = _written_in(pool)
    if not nodes or not others:
        return None
    values = dict(_symbols(graph, inputs))
    return AvoidSpans({node: sizes for node in nodes if (sizes := _bytes(node, values))}, others)


def _symbols(graph: fx.Graph, inputs: Sequence[object]) -> Iterator[tuple[sympy.Expr, int]]:
    """The values that the symbols in the shapes of a graph's inputs have in one call."""
    for node, given in zip(graph.find_nodes(op="placeholder"), inputs, strict=True):
        if isinstance(given, torch.Tensor):
            for size, actual in zip(node.meta["val"].shape, given.shape, strict=True):
                if isinstance(size, torch.SymInt):
                    yield size.node.expr, actual


def _bytes(node: fx.Node, values: Mapping[sympy.Expr, int]) -> list[int]:
    """The bytes of a node's storages, as far as the symbols tell."""
    sizes = [leaf.untyped_storage().nbytes() for leaf in tensor_leaves(node)]
    known = [size if isinstance(size, int) else size.node.expr.xreplace(values) for size in sizes]
    return [int(size) for size in known if isinstance(size, int) or size.is_number]


def _written_in(pool: PoolHandle, besides: CaptureSpans | None = None) -> list[Span]:
    """The addresses that the living captures of a pool write, one of them left out."""
    with _lock:
        captures = [spans for spans in _alive if spans is not besides and spans.pool == pool]
    return [span for spans in captures for span in spans.written]


_lock = threading.Lock()

_alive: weakref.WeakSet[CaptureSpans] = weakref.WeakSet()
"""Those of all captures that can still be replayed; callers may put graphs of several functions into one pool."""


def _overlaps(span: Span, others: Iterable[Span]) -> bool:
    return any(span[0] < stop and start < span[1] for start, stop in others)


class HasSpans(Protocol):
    """A capture, as far as this module knows it."""

    @property
    def spans(self) -> CaptureSpans:
        """The addresses that it writes."""


Capture = TypeVar("Capture", bound=HasSpans)


def recapture_until_disjoint(capture: Capture, recapture: Callable[[AvoidSpans], Capture]) -> Capture:
    """The capture, or a later one of the same graph, whose results no other capture overwrites.

    A rejected capture is kept until the end, so that its results keep their memory and the next capture gets other memory.

    Args:
        capture: not replayed yet.
        recapture: captures the graph again, with its results outside of the given addresses.

    Returns:
        The last one tried where all have results that are overwritten.
    """
    rejected: list[Capture] = []
    while capture.spans.has_overwritten_results() and len(rejected) < _MAX_RECAPTURES:
        capture.spans.retire()
        rejected.append(capture)
        capture = recapture(capture.spans.avoid_spans())
    return capture
