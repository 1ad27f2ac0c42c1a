"""Hears from torch_npu's caching allocator what it hands out and takes back.

torch_npu tells this for its own stream sanitizer, by address alone and to every listener for the rest of the process; the
size of a block is what the allocator's running total grew by.
"""

from __future__ import annotations

import builtins
import gc
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from npu_emulator.memory.watch import MemoryWatch

__all__ = ["AllocatorFeed"]

_STREAM_MODE = 0
"""torch_npu's number for the kind of trace that tells of streams and memory."""


class AllocatorFeed:
    """Passes what the allocator tells to the watch of the moment; one for the life of the process."""

    def __init__(self) -> None:
        """Subscribe. torch_npu has no way to unsubscribe, so each allocation costs a Python call from now on."""
        import torch
        import torch_npu
        from torch_npu.utils import _npu_trace

        self.watch: MemoryWatch | None = None
        self._statistics = torch_npu._C._npu_memoryStats  # noqa: SLF001 - the public form flattens a large dictionary
        self._device = torch.npu.current_device
        self._totals: dict[int, int] = {}
        _npu_trace.register_callback_for_npu_memory_allocation(self._allocated, "npu_emulator")
        _npu_trace.register_callback_for_npu_memory_deallocation(self._freed, "npu_emulator")
        torch_npu._C._activate_npu_trace(_STREAM_MODE)  # noqa: SLF001 - what torch_npu's sanitizer does
        gc.callbacks.append(_let_import)

    def start(self, watch: MemoryWatch) -> None:
        """Tell `watch` from now on."""
        import torch

        self._totals = {device: self._total(device) for device in range(torch.npu.device_count())}
        self.watch = watch

    def _total(self, device: int) -> int:
        return int(self._statistics(device)["allocated_bytes"]["all"]["allocated"])

    def _allocated(self, address: int) -> None:
        if self.watch is None:
            return
        device = self._device()
        total = self._total(device)
        size = total - self._totals[device]
        self._totals[device] = total
        if size > 0:
            self.watch.allocated(address, size)

    def _freed(self, address: int) -> None:
        if self.watch is not None:
            self.watch.freed(address)


def _let_import(phase: str, info: object) -> None:
    """Let torch_npu tell of tensors that a garbage collection is about to free.

    It imports a module to do so, by the builtins of whatever frame the collection interrupts; inside the constructor of a
    named tuple those are empty, and the news would be lost in an error message.
    """
    del info
    interrupted = sys._getframe().f_back  # noqa: SLF001 - None when the interpreter ends
    if phase == "start" and interrupted is not None:
        known = interrupted.f_globals.get("__builtins__")
        if isinstance(known, dict):
            known.setdefault("__import__", builtins.__import__)
