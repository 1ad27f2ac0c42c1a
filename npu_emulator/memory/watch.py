"""Watches every kernel's use of memory, in the order in which the device runs them.

torch_npu's allocator reports each allocation and free. An allocation becomes a part of the last task on the block's stream,
which marks its bytes as unwritten (and poisons them). So the marks are in order with the other work, also inside a captured
graph, whose replays mark its intermediate results again: those bytes that the graph's kernels read or write, since other memory
of its pool may hold the results of another graph.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from npu_emulator.errors import MemoryFaultError
from npu_emulator.extents import extent_bytes
from npu_emulator.frames import are_addresses_compared, user_frames
from npu_emulator.memory.blocks import Block, Blocks
from npu_emulator.memory.report import FaultKind, MemoryFault
from npu_emulator.memory.rules import may_skip_reads, overwrites_in_part, reads_shapes_only

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from npu_emulator.kernels.moves import Move
    from npu_emulator.kernels.row_reads import RowReads
    from npu_emulator.launch import Launcher
    from npu_emulator.memory.shadow import Shadow

__all__ = ["MemoryWatch"]

_POISON, _MARK_UNWRITTEN = 1, 2
"""The modes of `Runtime.spoil`. Poison is 0xFF bytes: not a number in every floating-point dtype, -1 in every integer."""


class _Use(NamedTuple):
    """The facts about one launch that its checks need."""

    name: str
    frames: tuple[str, ...]
    stream: int
    captured: bool
    compared: bool
    """Whether the addresses are compared before each replay."""
    reads: Sequence[torch.Tensor]
    writes: Sequence[torch.Tensor]
    blocks: tuple[tuple[torch.Tensor, Block], ...]
    move: Move | RowReads | None
    """The call, if it only moves elements within the device."""


@dataclass
class _Check:
    """A block that asks for faults: what was found in it, and whether the first one stops it."""

    stop: bool
    faults: list[MemoryFault] = field(default_factory=list)
    seen: set[object] = field(default_factory=set)


class MemoryWatch:
    """The checks of a part of a program."""

    def __init__(self, launcher: Launcher, shadow: Shadow | None, *, poison: bool, stop_at_first: bool) -> None:
        """Watch what `launcher` launches; `poison` fills memory with 0xFF bytes when it is allocated and freed.

        Without a `shadow` nothing is checked.
        """
        self._checks = [_Check(stop_at_first)]
        self._launcher = launcher
        self._shadow = shadow
        self._poison = poison
        self._blocks = Blocks()

    @property
    def faults(self) -> list[MemoryFault]:
        """All that was found so far."""
        return self._checks[0].faults

    @property
    def is_checking(self) -> bool:
        """Whether faults are looked for, beside the poison."""
        return self._shadow is not None

    @contextmanager
    def checked_within(self, *, poison: bool, stop_at_first: bool) -> Iterator[list[MemoryFault]]:
        """A block inside this watch; yield a list that fills with the block's faults, which this watch reports too."""
        around, self._poison = self._poison, poison
        self._checks.append(_Check(stop_at_first))
        try:
            yield self._checks[-1].faults
        finally:
            self._checks.pop()
            self._poison = around

    # -- the allocator's reports ---------------------------------------------------------------------------------------

    def allocated(self, address: int, size: int) -> None:
        """The allocator allocated `size` bytes for the current stream."""
        stream = self._launcher.current_stream()
        block = Block(address, size, stream, self._launcher.is_capturing(stream), self._frames())
        block.since = self._launcher.runtime.new_moment()
        self._blocks.add(block)
        how = (_POISON if self._poison else 0) | (_MARK_UNWRITTEN if self._shadow is not None else 0)
        self._launcher.runtime.spoil(stream, address, size, how)

    def freed(self, address: int) -> None:
        """The allocator freed a block."""
        block = self._blocks.holding(address)
        if block is None or sys.is_finalizing():
            return
        block.freed = self._frames()
        block.until = self._launcher.runtime.new_moment()
        # Memory freed during a capture belongs to the graph; replays spoil it themselves.
        ours = self._poison and not block.captured and not torch.npu.is_current_stream_capturing()
        self._launcher.runtime.spoil_freed(block.start, block.size, _POISON if ours else 0)

    def take_stock(self, segments: Iterable[Mapping[str, Any]]) -> None:
        """Read the allocator's blocks and poison the free ones, which may contain right values of an earlier run.

        Args:
            segments: the result of `torch.npu.memory_snapshot`. Memory of graphs' pools, which replays use, is skipped.
        """
        for segment in segments:
            captured = tuple(segment["segment_pool_id"]) != (0, 0)
            for block in segment["blocks"]:
                address, size = block["address"], block["size"]
                if block["state"] == "active_allocated":
                    self._blocks.add(Block(address, size, segment["stream"], captured, ()))
                elif block["state"] == "inactive" and self._poison and not captured:
                    self._launcher.runtime.spoil_freed(address, size, _POISON)

    def _frames(self) -> tuple[str, ...]:
        """The Python lines of an allocation, for a report; without checks there are none."""
        return user_frames() if self._shadow is not None else ()

    # -- what the launcher tells ----------------------------------------------------------------------------------------

    def guard(  # noqa: PLR0913 - what a launch is made of
        self,
        name: str,
        stream: int,
        body: Callable[[], object],
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        move: Move | RowReads | None,
        *,
        fresh: bool,
    ) -> Callable[[], object]:
        """Return `body` with a check of its reads before it and a mark of its writes after it.

        `move` is as in `_Use`, and `fresh` as in `Launcher.launch`.
        """
        captured = self._launcher.is_capturing(stream)
        if captured:
            for tensor in (*reads, *writes):
                self._launcher.runtime.note_use(stream, tensor.data_ptr(), extent_bytes(tensor))
        shadow = self._shadow
        if shadow is None:
            return body
        blocks = tuple(
            (tensor, block)
            for tensor in (*reads, *writes)
            if (block := self._blocks.holding(tensor.data_ptr())) is not None
        )
        compared = captured and are_addresses_compared()
        if move is not None and any(target.numel() and shadow.over(target) is None for target in writes):
            move = None  # the host reads, and has no marks
        made = self._blocks.holding(writes[0].data_ptr()) if fresh and writes else None
        # The same lines have allocated what this launch writes; to walk the stack again takes as long as all else here.
        frames = made.frames if made is not None and made.freed is None and made.frames else user_frames()
        use = _Use(name, frames, stream, captured, compared, reads, writes, blocks, move)
        self._check_launch(use)

        def guarded() -> None:
            self._check_blocks(use)
            self._check_reads(use, shadow)
            body()
            self._mark(use, shadow)

        return guarded

    def _check_launch(self, use: _Use) -> None:
        """Check that a kernel's memory is allocated and large enough at its launch."""
        for tensor, block in use.blocks:
            size = extent_bytes(tensor)
            if block.captured and (use.compared or not use.captured):
                continue  # a graph's result: results of graphs that are never needed at one time may share memory
            if block.freed is not None:
                self._report(use, FaultKind.FREED, tensor, block, size)
            elif tensor.data_ptr() + size > block.end:
                self._report(use, FaultKind.OUTSIDE, tensor, block, size)

    def _check_blocks(self, use: _Use) -> None:
        """Check that a captured kernel's memory is the same allocation at every replay, unless the graph owns it.

        What counts is the launch of the replay: work that frees the memory later, or allocates it again, runs after it. Where the
        addresses are compared before a replay, a whole tensor that lies there was given to the graph.
        """
        if not use.captured:
            return  # eager work may use freed memory: its stream runs the queued work before a new owner's
        launched = self._launcher.runtime.replay_moment()
        for tensor, block in use.blocks:
            if block.captured or block.until > launched:
                continue
            now, size = self._blocks.holding(tensor.data_ptr()), extent_bytes(tensor)
            end = tensor.data_ptr() + size
            # Of a tensor that lay there at the launch, and lies there no more, nothing is known.
            if use.compared and now is not None and now.until > launched and (end <= now.end or now.since > launched):
                continue
            kind = FaultKind.FREED if now is block else FaultKind.REUSED
            self._report(use, kind, tensor, block, size)

    def _check_reads(self, use: _Use, shadow: Shadow) -> None:
        if reads_shapes_only(use.name):
            return
        for tensor in use.reads if use.move is None else use.move.checked(use.reads):
            if overwrites_in_part(use.name) and any(_same(tensor, target) for target in use.writes):
                continue
            marks = shadow.over(tensor)
            if marks is None or not marks.any():
                continue
            missing = int(marks.count_nonzero())
            block = self._blocks.holding(tensor.data_ptr())
            may_skip = use.move is None and may_skip_reads(use.name)
            if block is not None and not (may_skip and missing < marks.numel()):
                first = sum(
                    place * step for place, step in zip(marks.nonzero()[0].tolist(), marks.stride(), strict=True)
                )
                self._report(use, FaultKind.UNWRITTEN, tensor, block, missing, first)

    @staticmethod
    def _mark(use: _Use, shadow: Shadow) -> None:
        """Mark written bytes; where elements only move, their marks do, too."""
        if use.move is not None:
            use.move.carry(use.writes, shadow.over)
            return
        for target in use.writes:
            marks = shadow.over(target)
            if marks is not None:
                marks.zero_()

    def _report(
        self, use: _Use, kind: FaultKind, tensor: torch.Tensor, block: Block, count: int, first: int = 0
    ) -> None:
        """Tell of `count` bytes of a tensor, of which the first is `first` bytes from its beginning."""
        address = tensor.data_ptr() + first
        place = (kind, use.name, use.frames, block.frames)
        asking = [check for check in self._checks if place not in check.seen]
        if not asking:
            return
        stream = self._launcher.runtime.stream_id(use.stream)
        of_graph = block.captured and not use.captured
        fault = MemoryFault(
            kind, use.name, use.frames, stream, address, count, block.frames, block.freed or (), of_graph
        )
        for check in asking:
            check.seen.add(place)
            check.faults.append(fault)
        if any(check.stop for check in asking):
            raise MemoryFaultError(str(fault))


def _same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left is right or (left.data_ptr() == right.data_ptr() and left.size() == right.size())
