"""Watches every kernel's use of memory, in the order in which the device runs them.

torch_npu's allocator tells of each block it hands out and takes back. Handing out becomes a task on the block's stream that
marks its bytes as unwritten (and poisons them), so the marks are in order with the work around them: inside a captured
graph too, whose replays then mark its intermediate results anew.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NamedTuple

import torch

from npu_emulator.errors import MemoryFaultError
from npu_emulator.frames import user_frames
from npu_emulator.memory.blocks import Block, Blocks
from npu_emulator.memory.bounds import extent_bytes
from npu_emulator.memory.report import FaultKind, MemoryFault
from npu_emulator.memory.rules import is_copy, may_skip_reads, overwrites_in_part

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from npu_emulator.launch import Launcher
    from npu_emulator.memory.shadow import Shadow

__all__ = ["MemoryWatch"]

POISON = 0xFF
"""Not a number in every floating-point dtype, -1 in every signed integer."""
_FRESH = "npu_emulator::fresh_memory"
_FREED = "npu_emulator::freed_memory"


class _Use(NamedTuple):
    """One launch, as its checks need it."""

    name: str
    frames: tuple[str, ...]
    stream: int
    captured: bool
    reads: Sequence[torch.Tensor]
    writes: Sequence[torch.Tensor]
    blocks: tuple[tuple[torch.Tensor, Block], ...]


class MemoryWatch:
    """The checks of a span of a program."""

    def __init__(self, launcher: Launcher, shadow: Shadow, *, poison: bool, check: bool, stop_at_first: bool) -> None:
        """Watch what `launcher` launches; `poison` fills memory with 0xFF bytes when it is handed out and taken back."""
        self.faults: list[MemoryFault] = []
        self._launcher = launcher
        self._shadow = shadow
        self._poison = poison
        self._check = check
        self._stop = stop_at_first
        self._blocks = Blocks()
        self._seen: set[object] = set()

    # -- what the allocator tells ---------------------------------------------------------------------------------------

    def allocated(self, address: int, size: int) -> None:
        """The allocator handed out `size` bytes for the current stream."""
        stream = self._launcher.current_stream()
        block = Block(address, size, stream, self._launcher.is_capturing(stream), user_frames())
        self._blocks.add(block)
        shadow = self._shadow.over_range(address, size)
        memory = self._launcher.bytes_at(address, size) if self._poison else None

        def body() -> None:
            shadow.fill_(1)
            if memory is not None:
                memory.fill_(POISON)

        self._launcher.put(stream, _FRESH, body)

    def freed(self, address: int) -> None:
        """The allocator takes a block back."""
        block = self._blocks.holding(address)
        if block is None or sys.is_finalizing():
            return
        block.freed = user_frames()
        # Other streams may still use it, or a graph may own it: then its bytes are not ours to spoil.
        mine = not block.streams and block.captured == self._launcher.is_capturing(block.stream)
        if self._poison and mine and block.captured == bool(torch.npu.is_current_stream_capturing()):
            memory = self._launcher.bytes_at(block.start, block.size)
            self._launcher.put(block.stream, _FREED, lambda: memory.fill_(POISON))

    def recorded(self, address: int, stream: int) -> None:
        """`record_stream` was called on a tensor of the block."""
        block = self._blocks.holding(address)
        if block is not None:
            block.streams.add(stream)

    # -- what the launcher tells ----------------------------------------------------------------------------------------

    def guard(
        self,
        name: str,
        stream: int,
        body: Callable[[], object],
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
    ) -> Callable[[], object]:
        """Return `body` between its checks: before it what it uses, after it what it has written."""
        blocks = tuple(
            (tensor, block)
            for tensor in (*reads, *writes)
            if (block := self._blocks.holding(tensor.data_ptr())) is not None
        )
        use = _Use(name, user_frames(), stream, self._launcher.is_capturing(stream), reads, writes, blocks)
        if self._check:
            self._check_launch(use)

        def guarded() -> None:
            if self._check:
                self._check_blocks(use)
                self._check_reads(use)
            body()
            self._mark(use)

        return guarded

    def _check_launch(self, use: _Use) -> None:
        """At its launch a kernel's memory must be alive and large enough, whatever becomes of it until the kernel runs."""
        for tensor, block in use.blocks:
            size = extent_bytes(tensor)
            if block.freed is not None:
                self._report(use, FaultKind.FREED, tensor, block, size)
            elif tensor.data_ptr() + size > block.end:
                self._report(use, FaultKind.OUTSIDE, tensor, block, size)

    def _check_blocks(self, use: _Use) -> None:
        """Memory that a captured kernel met must be the same allocation at every replay, unless the graph owns it."""
        for tensor, block in use.blocks:
            if not use.captured or block.captured:
                continue  # eager work uses freed memory legally: what is queued on its stream comes before a new owner
            now = self._blocks.holding(tensor.data_ptr())
            if now is block and block.freed is None:
                continue
            kind = FaultKind.FREED if now is block else FaultKind.REUSED
            self._report(use, kind, tensor, block, tensor.numel() * tensor.element_size())

    def _check_reads(self, use: _Use) -> None:
        if is_copy(use.name) and all(self._shadow.over(target) is not None for target in use.writes) and use.writes:
            return  # a copy within the device carries the marks along
        for tensor in use.reads:
            if overwrites_in_part(use.name) and any(_same(tensor, target) for target in use.writes):
                continue
            shadow = self._shadow.over(tensor)
            if shadow is None or not shadow.any():
                continue
            missing = int(shadow.count_nonzero())
            block = self._blocks.holding(tensor.data_ptr())
            if block is not None and not (may_skip_reads(use.name) and missing < shadow.numel()):
                self._report(use, FaultKind.UNWRITTEN, tensor, block, missing)

    def _mark(self, use: _Use) -> None:
        """Mark what was written as written; a copy within the device copies the marks."""
        sources = [self._shadow.over(tensor) for tensor in use.reads] if is_copy(use.name) else []
        for target in use.writes:
            shadow = self._shadow.over(target)
            if shadow is None:
                continue
            if len(sources) == 1 and sources[0] is not None and sources[0].any():
                shadow.copy_(sources[0].any(-1, keepdim=True))
            else:
                shadow.zero_()

    def _report(self, use: _Use, kind: FaultKind, tensor: torch.Tensor, block: Block, count: int) -> None:
        address = tensor.data_ptr()
        place = (kind, use.name, use.frames, block.frames)
        if place in self._seen:
            return
        self._seen.add(place)
        stream = self._launcher.runtime.stream_id(use.stream)
        fault = MemoryFault(kind, use.name, use.frames, stream, address, count, block.frames, block.freed or ())
        self.faults.append(fault)
        if self._stop:
            raise MemoryFaultError(str(fault))


def _same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left is right or (left.data_ptr() == right.data_ptr() and left.size() == right.size())
