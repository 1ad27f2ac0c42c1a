"""The memory pools of a compiled graph: which one a capture joins after each thing that can happen to a pool."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from npugraph_ex.aclgraph.capture_pool import CaptureNotBegunError, CapturePool, PoolHandle


class Captures:
    """Captures that only note the pool which they joined, and that can be refused."""

    def __init__(self, pool: CapturePool) -> None:
        self.pool = pool
        self.joined: list[PoolHandle] = []
        self.refusals: list[Exception] = []

    def make(self) -> PoolHandle:
        """Capture once, refused as often as `refusals` says; return the pool that was joined."""

        def record(handle: PoolHandle) -> SimpleNamespace:
            self.joined.append(handle)
            if self.refusals:
                raise self.refusals.pop()
            return SimpleNamespace(graph=Retired(), handle=handle)

        return self.pool.capture(record).handle


class Retired:
    """Stands for a capture that is replayed no more."""


def test_captures_share_a_pool_until_it_is_freed() -> None:
    """A pool is gone with its last capture; the next capture opens another and no earlier handle is joined again."""
    captures = Captures(CapturePool(None, shared=True))
    assert captures.make() == captures.make()
    captures.pool.free()
    assert captures.make() == captures.make()
    first, second = captures.pool.handles
    assert captures.joined == [first, first, second, second]


def test_a_pool_for_each_capture() -> None:
    """With `reuse_graph_pool_in_same_fx=False` no two captures share a pool."""
    captures = Captures(CapturePool(None, shared=False))
    assert len({captures.make() for _ in range(3)}) == 3


def test_a_refusal_to_begin_is_tried_once_more_in_a_new_pool() -> None:
    """torch_npu leaves the refused pool joined; what is retired is freed first, as it may hold the streams."""
    captures, retired = Captures(CapturePool(None, shared=True)), Retired()
    captures.make()
    gone = weakref.ref(retired)
    captures.pool.retire([retired])
    del retired
    captures.refusals = [CaptureNotBegunError("no stream")]
    second = captures.make()
    assert gone() is None
    assert captures.pool.handles == [captures.joined[0], second]
    assert captures.joined[0] == captures.joined[1] != second
    captures.refusals = [CaptureNotBegunError("no stream")] * 2
    with pytest.raises(CaptureNotBegunError):
        captures.make()
    assert captures.make() not in captures.joined[:-1]


def test_a_refusal_after_the_beginning_leaves_a_pool_with_captures_as_it_is() -> None:
    """The pool can be joined again; one that was opened for the refused capture is gone with it."""
    captures = Captures(CapturePool(None, shared=True))
    captures.refusals = [RuntimeError("refused")]
    with pytest.raises(RuntimeError, match="refused"):
        captures.make()
    assert captures.pool.handles == []
    first = captures.make()
    captures.refusals = [RuntimeError("refused")]
    with pytest.raises(RuntimeError, match="refused"):
        captures.make()
    assert captures.make() == first


def test_a_callers_pool_is_joined_always_and_tried_once() -> None:
    """Its captures may be of other functions, so it is neither freed nor replaced here."""
    handle = torch.npu.graph_pool_handle()
    captures = Captures(CapturePool(handle, shared=True))
    captures.refusals = [CaptureNotBegunError("no stream")]
    with pytest.raises(CaptureNotBegunError):
        captures.make()
    captures.make()
    captures.pool.free()
    captures.make()
    assert captures.joined == [handle] * 3


def test_retired_captures_stay_until_they_are_dropped() -> None:
    """They keep the pool alive while the next capture joins."""
    pool, retired = CapturePool(None, shared=True), Retired()
    gone = weakref.ref(retired)
    pool.retire([retired])
    del retired
    gc.collect()
    assert gone() is not None
    pool.drop_retired()
    assert gone() is None
