"""What a captured graph does to the device's memory once it is captured: nothing, or it gives its results memory of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from npugraph_ex._garbage_collection import no_collection
from npugraph_ex.versions.device_memory import device_memory


@dataclass(frozen=True)
class _Counters:
    """The allocator's own: allocations so far, bytes in use, bytes taken from the device."""

    allocations: int
    allocated: int
    reserved: int

    @classmethod
    def now(cls) -> _Counters:
        return cls(
            device_memory().memory_stats().get("allocation.all.allocated", 0),
            device_memory().memory_allocated(),
            device_memory().memory_reserved(),
        )


def replay_uses_memory(function: Callable[..., Sequence[Any]], inputs: Sequence[Any]) -> str | None:
    """How a replay changes the device's memory; None where it does not, or copies its results and nothing else.

    Results are copied where another graph of the pool writes what the captured ones lie in.

    Args:
        function: makes one call, on inputs that are there already. Earlier results of it must be gone, so that a captured
            graph is free to be replayed. It is called three times; the first may capture.
        inputs: of each call.
    """
    function(*inputs)
    with no_collection():  # what earlier examples left would go now, or not, and not tell which
        return next(filter(None, (_growth(function, inputs) for _ in range(2))), None)


def _growth(function: Callable[..., Sequence[Any]], inputs: Sequence[Any]) -> str | None:
    before = _Counters.now()
    results = function(*inputs)
    during = _Counters.now()
    made, copied = during.allocations - before.allocations, during.allocated > before.allocated
    allowed = len(_storages(results) - _storages(inputs)) if copied else 0
    del results
    after = _Counters.now()
    if made != allowed:
        return f"allocates: {made} blocks in a call that should replay, and {allowed} for copies of its results"
    if (after.allocated, after.reserved) != (before.allocated, before.reserved):
        return (
            f"keeps memory: {after.allocated - before.allocated} bytes more in use and "
            f"{after.reserved - before.reserved} more taken from the device after a call whose results are gone"
        )
    return None


def _storages(values: Sequence[Any]) -> set[int]:
    """Where the memory of each tensor begins; one without elements has none."""
    storages = (value.untyped_storage() for value in values if isinstance(value, torch.Tensor))
    return {storage.data_ptr() for storage in storages if storage.nbytes()}
