"""The addresses that the captures of one memory pool write: no replay may overwrite results of another capture.

Captures share a pool so that their intermediate values share memory. Memory that one capture used and freed may become
the result of a later capture; a replay of the earlier one then overwrites it. The reverse cannot happen: results stay
allocated as long as their capture lives.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

import sympy
import torch
from torch import fx

from npugraph_ex.aclgraph.capture_pool import PoolHandle
from npugraph_ex.graph.memory.aliases import tensor_leaves

_MAX_RECAPTURES = 3
"""How often a graph is captured again to move its results. Once is enough, except for kernels with much scratch memory."""

_MAX_BLOCKS = 256
"""How many unsuitable blocks of the allocator one result may occupy."""

Span = tuple[int, int]
"""The address of the first byte, and the address after the last byte."""


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
        """Occupy the blocks that the allocator could give ``node`` for its results but must not.

        Args:
            node: about to run, under capture.

        Returns:
            The occupied blocks. Keep them referenced until the node has run.
        """
        occupied: list[torch.Tensor] = []
        suitable: list[torch.Tensor] = []  # the operator gets these blocks, because they fit and are freed last
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
        _alive[id(self)] = self

    def has_overwritten_results(self) -> bool:
        """Whether a replay of another capture overwrites these results."""
        return any(_overlaps(span, self._results) for span in _written_in(self.pool, self))

    def avoid_spans(self) -> AvoidSpans:
        """The addresses that a new capture of the same graph must avoid, so that no other capture overwrites its results."""
        sizes: dict[fx.Node, list[int]] = {}
        for span in self._results:
            for node in self.written.get(span, ()):
                sizes.setdefault(node, []).append(span[1] - span[0])
        return AvoidSpans(sizes, _written_in(self.pool, self))

    def result_nodes(self) -> list[fx.Node]:
        """The nodes that returned the results."""
        return [node for span in self._results for node in self.written.get(span, ())]

    def retire(self) -> None:
        """Ignore these addresses from now on, because the capture will not be replayed."""
        _alive.pop(id(self), None)


def predict_avoid_spans(
    graph: fx.Graph, nodes: Sequence[fx.Node], inputs: Sequence[object], pool: PoolHandle
) -> AvoidSpans | None:
    """Predict `CaptureSpans.avoid_spans` before a capture, so that a new size takes one capture and not two.

    Args:
        graph: the graph that is captured next, with ``inputs``.
        nodes: its nodes that returned results in an earlier capture, perhaps of other sizes.
        inputs: the call's inputs.
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
    """The bytes of a node's storages, as far as the symbols give them."""
    sizes = [leaf.untyped_storage().nbytes() for leaf in tensor_leaves(node)]
    known = [size if isinstance(size, int) else size.node.expr.xreplace(values) for size in sizes]
    return [int(size) for size in known if isinstance(size, int) or size.is_number]


def _written_in(pool: PoolHandle, besides: CaptureSpans | None = None) -> list[Span]:
    """The addresses that the captures of a pool write, except those of the capture ``besides``."""
    captures = [spans for reference in _alive.valuerefs() if (spans := reference()) is not None]
    return [span for spans in captures if spans is not besides and spans.pool == pool for span in spans.written]


_alive: weakref.WeakValueDictionary[int, CaptureSpans] = weakref.WeakValueDictionary()
"""The spans, by `id`, of all captures that can still be replayed. Callers may put graphs of several functions into one pool.

Each use is one step for other threads. A lock would stop everything if Ctrl-C or a finalizer came while it is held.
"""


def _overlaps(span: Span, others: Iterable[Span]) -> bool:
    return any(span[0] < stop and start < span[1] for start, stop in others)


class HasSpans(Protocol):
    """The part of a capture that this module uses."""

    @property
    def spans(self) -> CaptureSpans:
        """The addresses that it writes."""


Capture = TypeVar("Capture", bound=HasSpans)


def recapture_until_disjoint(capture: Capture, recapture: Callable[[AvoidSpans], Capture]) -> Capture:
    """The capture, or a later one of the same graph, whose results no other capture overwrites.

    A rejected capture is kept until the end, so that its results keep their memory and the next capture gets other memory.

    Args:
        capture: a capture that was not replayed yet.
        recapture: captures the graph again, with its results outside the given addresses.

    Returns:
        The last capture, if every capture has results that are overwritten.
    """
    rejected: list[Capture] = []
    while capture.spans.has_overwritten_results() and len(rejected) < _MAX_RECAPTURES:
        capture.spans.retire()
        rejected.append(capture)
        capture = recapture(capture.spans.avoid_spans())
    return capture
