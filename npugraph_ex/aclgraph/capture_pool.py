"""The memory pools of captures: which pool the next capture joins, and what keeps that pool alive until then.

torch_npu frees a pool together with the last graph in it, and no graph can join a freed pool. So the latest graph stays here,
also when its compiled graph is gone; it owns none of the pool's memory. Captures that are dropped, and may still run, stay until
the next capture has joined. A capture that the device refuses to begin leaves its pool joined, and torch_npu lets nobody join it
a second time; the next capture then opens a new pool.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

import torch

from npugraph_ex.errors import CaptureError

PoolHandle = tuple[int, int]
"""torch_npu's name of a memory pool."""


class _Capture(Protocol):
    graph: torch.npu.NPUGraph


Capture = TypeVar("Capture", bound=_Capture)


class CaptureNotBegunError(CaptureError):
    """The device refused to begin a capture."""


class CapturePool:
    """The pools that the captures of one or several compiled graphs join.

    Args:
        handle: the caller's pool; None to open pools as they are needed.
        shared: whether all captures join one pool; each opens its own otherwise.

    Attributes:
        handles: the pools, in the order in which they were opened; the caller's first.
    """

    def __init__(self, handle: PoolHandle | None, *, shared: bool) -> None:
        self.handles = [] if handle is None else [handle]
        self._is_callers = handle is not None
        self._shared = shared
        self._can_join = handle is not None and shared
        self._latest: object = None  # torch_npu's graph of the latest capture
        self._retired: list[object] = []

    def capture(self, record: Callable[[PoolHandle], Capture]) -> Capture:
        """Capture into the pool. If the device has no stream or no memory left, free what nobody uses and try again.

        Args:
            record: captures into the pool of the given handle.

        Raises:
            CaptureNotBegunError: the device refused to begin twice, or once with a caller's pool.
            CaptureError: the device refused something else, or has no memory even so.
        """
        try:
            return self._join(record)
        except CaptureNotBegunError:
            if self._is_callers:
                raise
            # Graphs of deleted models may still own the streams until the garbage collector runs.
            self._retired.clear()
            gc.collect()
        except CaptureError as error:
            if not isinstance(error.__cause__, torch.OutOfMemoryError):
                raise
            # Memory that torch_npu keeps from eager work: a capture can neither use nor free it.
            torch.npu.empty_cache()
        return self._join(record)

    def _join(self, record: Callable[[PoolHandle], Capture]) -> Capture:
        opens = not self._can_join
        if opens:
            self.handles.append(torch.npu.graph_pool_handle())
        try:
            capture = record(self.handles[-1])
        except BaseException as error:
            if opens:
                self.handles.pop()  # torch_npu freed the pool with its only graph
            elif isinstance(error, CaptureNotBegunError):
                self._can_join = self._is_callers
            raise
        self._can_join, self._latest = self._shared, capture.graph if self._shared else None
        return capture

    def retire(self, captures: Iterable[object]) -> None:
        """Keep captures that no later call replays until the next capture, because the device may still run them."""
        self._retired.extend(captures)

    def drop_retired(self) -> None:
        """Free the retired captures. The pool stays: a newer capture has joined it."""
        self._retired.clear()

    def free(self) -> None:
        """Free the retired captures, where no other capture is left. None of them may still run. A caller's pool stays joinable."""
        self._retired.clear()
        self._can_join, self._latest = self._is_callers and self._shared, None
