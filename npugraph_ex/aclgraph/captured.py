"""One captured ACLGraph: its buffers, its outputs, and the replay."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from npugraph_ex.aclgraph.inputs import Buffer, InputPlan
from npugraph_ex.aclgraph.outputs import Outputs
from npugraph_ex.config.options import Options
from npugraph_ex.errors import CaptureError

_INVALID_CAPTURE = "107026"  # what ending a capture answers that an earlier error invalidated


class CapturedGraph:
    """A graph captured for one combination of sizes and addresses.

    Args:
        function: the optimised graph's forward; called once, under capture.
        inputs: the caller's inputs at the call that captures.
        plan: what happens to each of them.
        options: `clone_input` and `capture_error_mode` are read.
        stream: where to capture; not the current stream.
        pool: the memory pool that all graphs of this FX graph share.

    Raises:
        CaptureError: the device refused something that the graph does.
    """

    def __init__(
        self,
        function: Callable[..., Sequence[Any]],
        inputs: Sequence[Any],
        plan: InputPlan,
        options: Options,
        stream: torch.npu.Stream,
        pool: tuple[int, int],
    ) -> None:
        self._buffers = [
            (position, Buffer(inputs[position], adopt=not options.clone_input)) for position in plan.copied
        ]
        arguments = list(inputs)
        for position, buffer in self._buffers:
            arguments[position] = buffer.tensor
        self._graph = torch.npu.NPUGraph()
        values = self._capture(function, arguments, stream, pool, options.capture_error_mode)
        self.outputs = Outputs(values, arguments)
        del values, arguments
        self.outputs.settle()

    def _capture(
        self,
        function: Callable[..., Sequence[Any]],
        arguments: Sequence[Any],
        stream: torch.npu.Stream,
        pool: tuple[int, int],
        error_mode: str,
    ) -> Sequence[Any]:
        current = torch.npu.current_stream()
        stream.wait_stream(current)
        # A collection inside the capture could free tensors whose release asks the device something.
        with torch.npu.stream(stream), _no_collection():
            self._graph.capture_begin(pool=pool, capture_error_mode=error_mode)
            try:
                values = function(*arguments)
            except Exception as error:
                with contextlib.suppress(RuntimeError):  # the capture is invalid already; the cause is what matters
                    self._graph.capture_end()
                raise CaptureError(
                    f"the device refused to capture this graph: {error}\n"
                    "Move the operation out of the compiled region, or compile with options={'force_eager': True}"
                ) from error
            self._graph.capture_end()
        current.wait_stream(stream)
        return values

    def replay(self, inputs: Sequence[Any]) -> None:
        """Copy the inputs in and run the graph on the current stream."""
        for position, buffer in self._buffers:
            buffer.load(inputs[position])
        self._graph.replay()


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
