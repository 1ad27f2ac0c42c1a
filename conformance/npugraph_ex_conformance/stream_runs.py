"""Runs a graph of several streams exactly as it is written, and asks the emulated device whether its order is right.

Nothing is added: no fork, no join, no event. That makes it an oracle for the stream check, and for the runtime, which add
and remove events. Which free block the allocator hands out next is its own affair; where the check says that a certain
one is possible, `Reuse` makes it so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

import npu_emulator
from npu_emulator.races.report import Race
from npugraph_ex.graph.streams.events import MAIN, is_record, is_record_stream, is_wait, stream_of
from npugraph_ex.graph.streams.ops import KEEP_ALIVES, argument
from npugraph_ex.versions.failed_captures import leave_capture

SCHEDULES = ("fifo", "lazy", *(f"random:{seed}" for seed in range(6)), *(f"pct:{seed}:3" for seed in range(6)))
"""The orders under which `judge` runs a graph."""


class Reuse(NamedTuple):
    """That a node is given the memory of a value which was dropped before it, whatever else is free.

    Attributes:
        node: the name of a node that allocates.
        value: of a node whose value, or the base of it, lay in that memory.
    """

    node: str
    value: str


class BlockNotFreeError(Exception):
    """The allocator cannot hand out a block, because it is in use."""


_BLOCKS = 256
"""How many blocks `Reuse` takes from the allocator, at most, until it is given the wanted one."""


class AsWritten(fx.Interpreter):
    """Runs a labelled graph on real streams and events, and drops each value after its last use.

    Args:
        gm: labelled, with ``record`` and ``wait`` nodes.
        main: the stream for nodes without a label.
        reuse: what the allocator must do for one node.

    Attributes:
        missed: whether the memory that ``reuse`` asks for was in use.
    """

    def __init__(self, gm: fx.GraphModule, main: torch.npu.Stream, reuse: Reuse | None = None) -> None:
        super().__init__(gm)
        self._streams = {MAIN: main}
        self._reuse = reuse
        self._wanted = 0
        self.missed = False

    def run_node(self, n: fx.Node) -> Any:
        """Run one node on its stream, and keep its value only for those who use it."""
        value = self._launch(n) if self._reuse is None else self._given_that_block(n, self._reuse)
        return value if n.users or n.op == "output" else None

    def _given_that_block(self, n: fx.Node, reuse: Reuse) -> Any:
        """Run one node; the allocator is made to do for it, or about it, what was asked for."""
        if n.name == reuse.node:
            with torch.npu.stream(self._stream(stream_of(n))):
                held = self._all_but_the_wanted(n.meta["val"])
            value = self._launch(n)
            del held
            return value
        value = self._launch(n)
        if n.name == reuse.value:
            self._wanted = value.untyped_storage().data_ptr()
        return value

    def _all_but_the_wanted(self, like: torch.Tensor) -> list[torch.Tensor]:
        """Take every block that the allocator would hand out before the wanted one, which is the next then."""
        held: list[torch.Tensor] = []
        while len(held) < _BLOCKS:
            block = torch.empty(like.shape, dtype=like.dtype, device="npu")
            if block.data_ptr() == self._wanted:
                return held
            held.append(block)
        self.missed = True  # an exception here would be lost in the end of the capture, which then fails as well
        return held

    def _launch(self, n: fx.Node) -> Any:
        stream = self._stream(MAIN if n.op == "output" else stream_of(n))
        if is_record(n):
            return stream.record_event()
        with torch.npu.stream(stream):
            if is_wait(n):
                for event in self.fetch_args_kwargs_from_env(n)[0][0]:
                    stream.wait_event(event)
                return None
            if is_record_stream(n):
                tensor = self.fetch_args_kwargs_from_env(n)[0][0]
                tensor.record_stream(self._stream(argument(n, 1, "stream")))
                return None
            return None if n.target in KEEP_ALIVES else super().run_node(n)

    def _stream(self, label: str) -> torch.npu.Stream:
        """The stream of a label; none that another label has: torch_npu deals them out of a pool, again and again."""
        while label not in self._streams:
            stream = torch.npu.Stream()
            if stream not in self._streams.values():
                self._streams[label] = stream
        return self._streams[label]


class CapturedAsWritten:
    """A graph captured exactly as it is written, with its streams and events, in a memory pool of its own.

    Args:
        gm: labelled, with ``record`` and ``wait`` nodes; it may write its inputs.
        inputs: CPU tensors.
        reuse: as in `AsWritten`.

    Raises:
        RuntimeError: the device refused, for instance because a stream is not joined (107025).
        BlockNotFreeError: the memory that ``reuse`` asks for is in use.
    """

    def __init__(self, gm: fx.GraphModule, inputs: Sequence[torch.Tensor], reuse: Reuse | None = None) -> None:
        self._buffers = [torch.empty_like(tensor, device="npu") for tensor in inputs]
        self._graph, pool = torch.npu.NPUGraph(), torch.npu.graph_pool_handle()
        torch.npu.synchronize()
        # The outer block puts the current stream back where ending the capture fails; torch.npu.graph alone does not.
        try:
            with torch.npu.stream(torch.npu.current_stream()), torch.npu.graph(self._graph, pool=pool):
                run = AsWritten(gm, torch.npu.current_stream(), reuse)
                self._outputs = run.run(*self._buffers)
        except RuntimeError:
            leave_capture(torch.npu.current_device(), pool)
            raise
        if run.missed:
            raise BlockNotFreeError(f"{reuse} cannot be: that memory is in use")

    def replay(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run once on new inputs, waiting for nothing but the replay's own stream.

        Returns:
            The outputs, then the inputs as the graph left them, on the CPU.
        """
        for buffer, tensor in zip(self._buffers, inputs, strict=True):
            buffer.copy_(tensor)
        self._graph.replay()
        results = [tensor.cpu() for tensor in (*self._outputs, *self._buffers)]
        torch.npu.synchronize()
        return results


def run_in_order(gm: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The results that the program means: node by node on the CPU, streams and events left out; as `replay`."""
    buffers = [tensor.clone() for tensor in inputs]
    outputs = _Sequential(gm).run(*buffers)
    return [*outputs, *buffers]


class _Sequential(fx.Interpreter):
    def run_node(self, n: fx.Node) -> Any:
        orders = is_record(n) or is_wait(n) or is_record_stream(n) or n.target in KEEP_ALIVES
        return None if orders else super().run_node(n)


@dataclass(frozen=True)
class StreamVerdict:
    """What the emulated device says of one graph.

    Attributes:
        refused: why it cannot be captured; empty if it can.
        races: what the race detector found.
        differing: the schedules under which a result is not the one that the program means.
    """

    refused: str
    races: tuple[Race, ...] = ()
    differing: tuple[str, ...] = ()

    @property
    def is_racy(self) -> bool:
        """Whether the device refused it, the detector found a race, or a schedule showed one."""
        return bool(self.refused or self.races or self.differing)

    def __str__(self) -> str:
        races = "\n".join(map(str, self.races)) or "no race"
        return self.refused or f"{races}\nschedules that differ: {', '.join(self.differing) or 'none'}"


def judge(
    gm: fx.GraphModule,
    inputs: Sequence[torch.Tensor],
    *,
    schedules: Sequence[str] = SCHEDULES,
    reuse: Reuse | None = None,
) -> StreamVerdict:
    """Ask the emulated device about a graph: its race detector, and the values of replays under several schedules.

    Args:
        gm: labelled, with ``record`` and ``wait`` nodes.
        inputs: CPU tensors.
        schedules: which orders to try, as `npu_emulator.schedule` takes them.
        reuse: which free block the allocator takes for one node.
    """
    expected = run_in_order(gm, inputs)
    differing = []
    with npu_emulator.detect_races() as races:
        try:
            captured = CapturedAsWritten(gm, inputs, reuse)
        except RuntimeError as error:
            return StreamVerdict(str(error))
        for text in schedules:
            with npu_emulator.schedule(text):
                results = captured.replay(inputs)
            if not all(torch.equal(*pair) for pair in zip(results, expected, strict=True)):
                differing.append(text)
    return StreamVerdict("", tuple(races), tuple(differing))
