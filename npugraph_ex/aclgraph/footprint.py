"""Which captured graphs of one memory pool write where: so that no replay overwrites the results that another one handed out.

Graphs share a pool so that their intermediate values share memory. Memory that one graph used and freed while it was
captured may become the result of a graph that is captured later; a replay of the earlier one then writes over it. The other
way round cannot be: results stay allocated as long as their graph lives.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

import torch

_ATTEMPTS = 3
"""How often a graph is captured anew to have its results elsewhere."""

Span = tuple[int, int]
"""Addresses, from the first byte to the one after the last."""


def span_of(storage: torch.UntypedStorage) -> Span:
    """Where a storage lies."""
    start = storage.data_ptr()
    return start, start + storage.nbytes()


class Footprint:
    """Where one captured graph writes.

    Args:
        pool: the memory pool that it was captured into.
        written: everything that its operators returned.
        results: what it hands out.
    """

    def __init__(self, pool: tuple[int, int], written: Iterable[Span], results: Iterable[Span]) -> None:
        self.pool = pool
        self.written = frozenset(written)
        self._results = frozenset(results)
        with _lock:
            _alive.add(self)

    def is_overwritten(self) -> bool:
        """Whether a replay of another living graph writes over these results."""
        with _lock:
            others = [other for other in _alive if other is not self and other.pool == self.pool]
        return any(_meet(span, self._results) for other in others for span in other.written)

    def retire(self) -> None:
        """Count no more: the graph will not be replayed."""
        with _lock:
            _alive.discard(self)


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


def apart(graph: Graph, capture: Callable[[], Graph]) -> Graph:
    """The graph, or another capture of it, whose results no other graph overwrites; the last one tried where none is found.

    While a capture that will not do is kept, the place of its results is taken, so the next one gets another.

    Args:
        graph: just captured, and not replayed yet.
        capture: captures it again.
    """
    unfit: list[Graph] = []
    while graph.footprint.is_overwritten() and len(unfit) < _ATTEMPTS:
        graph.footprint.retire()
        unfit.append(graph)
        graph = capture()
    return graph
