"""Receives the allocations and frees of torch_npu's caching allocator, for a watch of memory and for the runtime's log.

torch_npu reports them for its own stream sanitizer, to every listener for the rest of the process. It reports only addresses.
A kernel says how many bytes it wants. Of other blocks the size is the growth of the allocator's total. Where another thread
allocates at the same time, or a kernel has, the growth is that of several blocks; then the allocator's snapshot says the size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from npu_emulator.requests import take_requested

if TYPE_CHECKING:
    from npu_emulator.device import Runtime
    from npu_emulator.memory.watch import MemoryWatch

__all__ = ["AllocatorFeed"]

_STREAM_MODE = 0
"""torch_npu's number for traces of streams and memory."""


class AllocatorFeed:
    """Passes the allocator's reports to the active watch, and to the log if it is wanted; one for the life of the process."""

    def __init__(self, runtime: Runtime) -> None:
        """Subscribe. torch_npu has no way to unsubscribe, so each allocation costs a Python call from now on."""
        import torch
        import torch_npu
        from torch_npu.utils import _npu_trace

        self.watch: MemoryWatch | None = None
        self.is_logging = False
        self._runtime = runtime
        self._statistics = torch_npu._C._npu_memoryStats  # noqa: SLF001 - the public form flattens a large dictionary
        self._device = torch.npu.current_device
        self._totals: dict[int, tuple[int, int]] = {}
        self._unreported = 0
        """Allocations that are in the totals, and whose reports are still to come."""
        _npu_trace.register_callback_for_npu_memory_allocation(self._allocated, "npu_emulator")
        _npu_trace.register_callback_for_npu_memory_deallocation(self._freed, "npu_emulator")
        runtime.guard_reports()
        torch_npu._C._activate_npu_trace(_STREAM_MODE)  # noqa: SLF001 - what torch_npu's sanitizer does

    def start(self, watch: MemoryWatch) -> None:
        """Pass reports to `watch` from now on."""
        self._begin()
        self.watch = watch

    def start_logging(self) -> None:
        """Put allocations into the runtime's log from now on."""
        if self.watch is None:
            self._begin()
        self.is_logging = True

    def _begin(self) -> None:
        import torch

        started = torch.npu.is_initialized()
        self._totals = {
            device: self._total(device) if started else (0, 0) for device in range(torch.npu.device_count())
        }
        self._unreported = 0

    def _total(self, device: int) -> tuple[int, int]:
        """The bytes and the number of all allocations so far."""
        statistics = self._statistics(device)
        return int(statistics["allocated_bytes"]["all"]["allocated"]), int(statistics["allocation"]["all"]["allocated"])

    def _allocated(self, address: int) -> None:
        if self.watch is None and not self.is_logging:
            return
        size = take_requested()
        if size:
            self._totals.clear()
            self._unreported = 0
        else:
            size = self._asked(address)
        if size > 0 and self.is_logging:
            self._runtime.note_allocated(address, size)
        if size > 0 and self.watch is not None:
            self.watch.allocated(address, size)

    def _asked(self, address: int) -> int:
        """The size of a block that was just allocated: torch_npu has to say it."""
        device = self._device()
        before, now = self._totals.get(device), self._total(device)
        self._totals[device] = now
        if before is None:
            return _size_of(address)
        new = now[1] - before[1]
        alone = new == 1 and self._unreported == 0
        self._unreported = max(0, self._unreported + new - 1)
        return now[0] - before[0] if alone else _size_of(address)

    def _freed(self, address: int) -> None:
        if self.watch is not None:
            self.watch.freed(address)


def _size_of(address: int) -> int:
    """The bytes of a block in use, from the allocator's snapshot; 0 where no block begins there."""
    import torch

    blocks = (block for segment in torch.npu.memory_snapshot() for block in segment["blocks"])
    return next((block["size"] for block in blocks if block["address"] == address), 0)
