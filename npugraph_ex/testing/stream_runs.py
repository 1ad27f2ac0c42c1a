"""Runs a graph of several streams exactly as it is written, and asks the emulated device whether its order can be trusted.

Nothing is added: no fork, no join, no event. That makes it an oracle for the stream check, and for the runtime, which add
and remove events.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

import npu_emulator
from npu_emulator.races.report import Race
from npugraph_ex.streams.events import MAIN, is_record, is_record_stream, is_wait, stream_of
from npugraph_ex.streams.ops import KEEP_ALIVES, argument

SCHEDULES = ("fifo", "lazy", *(f"random:{seed}" for seed in range(6)), *(f"pct:{seed}:3" for seed in range(6)))
"""The orders under which `judge` runs a graph."""


class AsWritten(fx.Interpreter):
    """Runs a labelled graph on real streams and events, and drops each value after its last use.

    Args:
        gm: labelled, with ``record`` and ``wait`` nodes.
        main: the stream for nodes without a label.
    """

    def __init__(self, gm: fx.GraphModule, main: torch.npu.Stream) -> None:
        super().__init__(gm)
        self._streams = {MAIN: main}

    def run_node(self, n: fx.Node) -> Any:
        """Run one node on its stream."""
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

    Raises:
        RuntimeError: the device refused, for instance because a stream is not joined (107025).
    """

    def __init__(self, gm: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> None:
        self._buffers = [torch.empty_like(tensor, device="npu") for tensor in inputs]
        self._graph = torch.npu.NPUGraph()
        torch.npu.synchronize()
        # The outer block puts the current stream back where ending the capture fails; torch.npu.graph alone does not.
        with torch.npu.stream(torch.npu.current_stream()), torch.npu.graph(self._graph):
            self._outputs = AsWritten(gm, torch.npu.current_stream()).run(*self._buffers)

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
class Verdict:
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


def judge(gm: fx.GraphModule, inputs: Sequence[torch.Tensor], *, schedules: Sequence[str] = SCHEDULES) -> Verdict:
    """Ask the emulated device about a graph: its race detector, and the values of replays under several schedules.

    Args:
        gm: labelled, with ``record`` and ``wait`` nodes.
        inputs: CPU tensors.
        schedules: which orders to try, as `npu_emulator.schedule` takes them.
    """
    expected = run_in_order(gm, inputs)
    differing = []
    with npu_emulator.detect_races() as races:
        try:
            captured = CapturedAsWritten(gm, inputs)
        except RuntimeError as error:
            return Verdict(str(error))
        for text in schedules:
            with npu_emulator.schedule(text):
                results = captured.replay(inputs)
            if not all(torch.equal(*pair) for pair in zip(results, expected, strict=True)):
                differing.append(text)
    return Verdict("", tuple(races), tuple(differing))
