"""Memory that tells: reads of bytes that nothing wrote, use of freed memory, and poison that makes both show."""

from __future__ import annotations

from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from npu_emulator.launch import Launcher
    from npu_emulator.memory.allocator import AllocatorFeed
    from npu_emulator.memory.watch import MemoryWatch

__all__ = ["start_watching", "watching"]


@cache
def _feed() -> AllocatorFeed:
    """Subscribe to the allocator once."""
    from npu_emulator.memory.allocator import AllocatorFeed

    return AllocatorFeed()


def start_watching(launcher: Launcher, *, poison: bool, check: bool, stop_at_first: bool) -> MemoryWatch:
    """Watch the memory of all kernels from now on; the device must have been started."""
    import torch

    from npu_emulator.memory.shadow import Shadow
    from npu_emulator.memory.watch import MemoryWatch

    shadow = Shadow(launcher.runtime, torch.npu.device_count())
    watch = MemoryWatch(launcher, shadow, poison=poison, check=check, stop_at_first=stop_at_first)
    launcher.memory = watch
    _feed().start(watch)
    return watch


@contextmanager
def watching(launcher: Launcher, *, poison: bool, check: bool, stop_at_first: bool) -> Iterator[MemoryWatch]:
    """Watch inside the block, then go back to who watched before."""
    import torch

    torch.npu.init()
    before = launcher.memory
    watch = start_watching(launcher, poison=poison, check=check, stop_at_first=stop_at_first)
    try:
        yield watch
        torch.npu.synchronize()
    finally:
        launcher.memory = before
        _feed().watch = before
