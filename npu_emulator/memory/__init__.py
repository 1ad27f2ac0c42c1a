"""Checks of memory: reads of unwritten bytes, use of freed memory, and poison that makes both visible."""

from __future__ import annotations

import os
import re
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING

from npu_emulator.errors import EmulatorError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from npu_emulator.device import Runtime
    from npu_emulator.launch import Launcher
    from npu_emulator.memory.allocator import AllocatorFeed
    from npu_emulator.memory.report import MemoryFault
    from npu_emulator.memory.watch import MemoryWatch

__all__ = ["logging_allocations", "poisoning", "start_watching", "watching"]

_UNCACHED = "PYTORCH_NO_NPU_MEMORY_CACHING"
"""torch_npu switches its caching allocator off where this variable begins with a number other than zero."""


@cache
def _feed(runtime: Runtime) -> AllocatorFeed:
    """Subscribe to the allocator once."""
    from npu_emulator.memory.allocator import AllocatorFeed

    return AllocatorFeed(runtime)


@contextmanager
def logging_allocations(runtime: Runtime) -> Iterator[None]:
    """Have the allocations of the block in the runtime's log."""
    feed = _feed(runtime)
    if feed.is_logging:
        yield
        return
    feed.start_logging()
    try:
        yield
    finally:
        feed.is_logging = False


def start_watching(launcher: Launcher, *, poison: bool, check: bool, stop_at_first: bool) -> MemoryWatch:
    """Watch the memory of all kernels from now on; the device must have been started.

    Raises:
        EmulatorError: torch_npu's caching allocator, which reports each allocation, is switched off.
    """
    import torch

    if check and re.match(r"\s*[+-]?0*[1-9]", os.environ.get(_UNCACHED, "")):
        raise EmulatorError(
            f"check_memory is told of each allocation by torch_npu's caching allocator, and {_UNCACHED} switches that off; "
            f"unset {_UNCACHED}"
        )

    from npu_emulator.memory.shadow import Shadow
    from npu_emulator.memory.watch import MemoryWatch

    shadow = Shadow(launcher.runtime, torch.npu.device_count()) if check else None
    watch = MemoryWatch(launcher, shadow, poison=poison, stop_at_first=stop_at_first)
    if not check:
        watch.take_stock(torch.npu.memory_snapshot())
    launcher.memory = watch
    _feed(launcher.runtime).start(watch)
    return watch


@contextmanager
def watching(launcher: Launcher, *, poison: bool, check: bool, stop_at_first: bool) -> Iterator[list[MemoryFault]]:
    """Watch inside the block, then restore the earlier watch; yield the list that fills with faults.

    A check inside another one shares its watch, which so knows the memory of both, and reports to both.
    """
    import torch

    torch.npu.init()
    around = launcher.memory
    if check and around is not None and around.is_checking:
        with around.checked_within(poison=poison, stop_at_first=stop_at_first) as faults:
            yield faults
            torch.npu.synchronize()
        return
    before_of_feed = _feed(launcher.runtime).watch
    watch = start_watching(launcher, poison=poison, check=check, stop_at_first=stop_at_first)
    try:
        yield watch.faults
        if check:
            torch.npu.synchronize()
    finally:
        if check:
            launcher.runtime.finish()  # also after an error: marks that are made later would be the next check's
        launcher.memory = around
        launcher.runtime.stop_poisoning()
        _feed(launcher.runtime).watch = before_of_feed


@contextmanager
def poisoning(launcher: Launcher) -> Iterator[None]:
    """Poison memory inside the block, unless an active watch already decides about poison."""
    if _feed(launcher.runtime).watch is not None:
        yield
        return
    with watching(launcher, poison=True, check=False, stop_at_first=False):
        yield
