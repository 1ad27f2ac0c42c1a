"""One captured ACLGraph: its buffers, its outputs, and the replay."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from npugraph_ex._garbage_collection import no_collection
from npugraph_ex.aclgraph import _npu_private, device_copies
from npugraph_ex.aclgraph.capture_pool import CaptureNotBegunError, PoolHandle
from npugraph_ex.aclgraph.group_streams import GroupStreams
from npugraph_ex.aclgraph.inputs import Buffer, InputMemory, InputPlan
from npugraph_ex.aclgraph.outputs import Outputs
from npugraph_ex.aclgraph.recording import Recording
from npugraph_ex.config.options import Options
from npugraph_ex.errors import BrokenPromiseError, CaptureError, NestedCaptureError
from npugraph_ex.versions.failed_captures import leave_capture

__npu_emulator_compares_addresses__ = True
"""The graph key has the addresses of all inputs that are used in place: another tensor at such an address is the caller's input."""


_OF_EXPERTS = 'experts of transformers are captured after model.set_experts_implementation("batched_mm")'


def refuse_in_a_capture(cause: Exception | None = None) -> None:
    """Raise NestedCaptureError if the program itself is capturing the current stream."""
    if torch.npu.is_current_stream_capturing():
        raise NestedCaptureError(
            "a compiled function was called while the program captures the current stream (torch.npu.graph), and no graph "
            "can hold the replay of another; compile the function with options={'force_eager': True}, which lets its "
            "operators be part of that capture, or call it outside"
        ) from cause


class CaptureMemory(NamedTuple):
    """Where a capture allocates.

    Attributes:
        pool: the memory pool that the capture joins.
        inputs: has the buffers of copied inputs.
        keeper: keeps the pool of the results alive; None if the capture owns the memory of its results.
    """

    pool: PoolHandle
    inputs: InputMemory
    keeper: object | None


class CapturedGraph:
    """A graph captured for one combination of sizes and addresses.

    Args:
        recording: runs the optimised graph once, under capture.
        inputs: the caller's inputs at the call that captures.
        plan: what happens to each of them.
        options: it reads `clone_input` and `capture_error_mode`.
        stream: captures, and launches updates; not the current stream.
        memory: where the capture allocates.

    Attributes:
        graph: torch_npu's graph, which keeps only the memory pool alive.
        outputs: the results.
        results_are_apart: whether no other capture writes where the results lie.

    Raises:
        CaptureError: the device refused something that the graph does.
        BrokenPromiseError: an operator does not keep its contract.
    """

    def __init__(
        self,
        recording: Recording,
        inputs: Sequence[Any],
        plan: InputPlan,
        options: Options,
        stream: torch.npu.Stream,
        memory: CaptureMemory,
    ) -> None:
        self._buffers = [
            (position, Buffer(inputs[position], None if not options.clone_input else memory.inputs.at(position)))
            for position in plan.copied
        ]
        arguments = list(inputs)
        for position, buffer in self._buffers:
            arguments[position] = buffer.tensor
        self.graph = torch.npu.NPUGraph()
        self._stream = stream
        self._device = plan.device
        values = self._capture(recording, arguments, memory.pool, options.capture_error_mode)
        self._launch = _npu_private.launcher(self.graph)
        self._updates = recording.updates
        groups = GroupStreams(recording.graph, plan.device)
        self._groups = groups or None  # so that the calls of most graphs do not ask it
        self.outputs = Outputs(values, arguments)
        own = recording.made.intersection(self.outputs.addresses())
        self.results_are_apart = memory.keeper is None or own <= recording.results
        if memory.keeper is not None:
            self.outputs.lend(own, memory.keeper)
        del values, arguments  # they would count as references to the results
        self.outputs.record_baseline_refcounts()

    def _capture(
        self, recording: Recording, arguments: Sequence[Any], pool: PoolHandle, error_mode: str
    ) -> Sequence[Any]:
        current, stream = torch.npu.current_stream(), self._stream
        stream.wait_stream(current)
        # Garbage collection inside the capture could free tensors, and freeing them could call the device.
        with torch.npu.stream(stream), no_collection():
            ended = False
            try:
                self._begin(pool, error_mode)
                values = recording(*arguments)
                ended = True
                self.graph.capture_end()
            except CaptureNotBegunError:
                raise
            except BaseException as error:  # Ctrl-C must also end the capture, at whatever line it comes
                if not (ended and isinstance(error, RuntimeError)):
                    # It is already invalid or over; only the first cause matters.
                    with contextlib.suppress(RuntimeError):
                        self.graph.capture_end()
                leave_capture(current.device_index, pool)
                if isinstance(error, BrokenPromiseError) or not isinstance(error, Exception):
                    raise
                reason = f"capture {recording.location}"
                if ended:  # an operator failed before and did not say so
                    reason = (
                        "end the capture (where other threads use the device meanwhile: "
                        "options={'capture_error_mode': 'thread_local'})"
                    )
                elif "grouped_mm" in reason:
                    reason += f" ({_OF_EXPERTS})"
                raise CaptureError(f"the device refused to {reason}: {error}") from error
        current.wait_stream(stream)
        return values

    def _begin(self, pool: PoolHandle, error_mode: str) -> None:
        try:
            self.graph.capture_begin(pool=pool, capture_error_mode=error_mode)
        except RuntimeError as error:
            raise CaptureNotBegunError(
                "the device refused to begin a capture (where streams are short: drop models that are not used, or "
                f"capture fewer sizes): {error}"
            ) from error

    def replay(self, inputs: Sequence[Any]) -> None:
        """Copy the inputs in, update host arguments, and run the graph on the current stream."""
        try:
            if self._buffers:
                stream = device_copies.current_stream_handle(self._device)
                for position, buffer in self._buffers:
                    buffer.load_bytes(inputs[position], stream)
            if self._updates is not None:
                self._updates.apply(inputs, self._stream)
            if self._groups is not None:
                self._groups.hold_back_replay()
                self._launch()
                self._groups.follow_replay()
            else:
                self._launch()
        except RuntimeError as error:
            refuse_in_a_capture(error)  # only now, so that other calls do not pay for the check
            raise
