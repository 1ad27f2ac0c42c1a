"""`Capturer`: captures one compiled graph for the inputs of a call, so that no replay overwrites another capture's results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from npugraph_ex.aclgraph import scopes, side_streams
from npugraph_ex.aclgraph.capture_pool import CapturePool, PoolHandle
from npugraph_ex.aclgraph.capture_spans import AvoidSpans, predict_avoid_spans, recapture_until_disjoint
from npugraph_ex.aclgraph.captured_graph import CapturedGraph, refuse_in_a_capture
from npugraph_ex.aclgraph.inputs import InputPlan
from npugraph_ex.aclgraph.recording import Recording
from npugraph_ex.aclgraph.scopes import GraphFunction
from npugraph_ex.aclgraph.static_kernels import StaticKernels
from npugraph_ex.config.options import Options
from npugraph_ex.graph.streams.labels import MAIN
from npugraph_ex.observe.logger import logger
from npugraph_ex.report.captures import publish
from npugraph_ex.versions.frame_room import roomy


class Capturer:
    """Makes the captures of one compiled graph.

    Args:
        gm: the optimised graph.
        around: prepares streams and scopes for a run of the graph, see `scopes.around`.
        options: the validated options.
        number: the compiled graph's number in `report.graphs`.
        kernels: compiles static kernels before a capture; None if the option is off.

    Attributes:
        pool: the memory pools of the captures.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        around: Callable[[GraphFunction], GraphFunction],
        options: Options,
        number: int,
        kernels: StaticKernels | None,
    ) -> None:
        self.pool = CapturePool(options.use_graph_pool, shared=options.reuse_graph_pool_in_same_fx)
        self._gm = gm
        self._around = around
        self._options = options
        self._number = number
        self._kernels = kernels
        self._stream: torch.npu.Stream | None = None
        self._result_nodes: list[fx.Node] = []  # the nodes that returned results in the last capture

    @roomy
    def capture(self, plan: InputPlan, inputs: Sequence[Any], numbers: tuple[Any, ...], reason: str) -> CapturedGraph:
        """Capture the graph and publish a record of it.

        Args:
            plan: what happens to each input.
            inputs: the call's inputs.
            numbers: the sizes and scalars of the graph key, for the record.
            reason: why no earlier capture serves the call, for the record.

        Raises:
            CaptureError: the device refused.
            BrokenPromiseError: an operator does not keep its contract.
        """
        with torch.npu.device(plan.device):
            refuse_in_a_capture()
            if self._kernels is not None:
                self._kernels.prepare(inputs)
            record = partial(self._record, plan, inputs)
            if self._options.clone_output is None:
                graph = recapture_until_disjoint(record(self._predicted_spans(inputs)), record)
                self._result_nodes = graph.spans.result_nodes()
            else:
                graph = record(None)
        self.pool.drop_retired()
        publish(numbers, reason, self._number)
        logger.debug("captured a graph because of %s", reason)
        return graph

    def _predicted_spans(self, inputs: Sequence[Any]) -> AvoidSpans | None:
        if not self.pool.handles:
            return None
        return predict_avoid_spans(self._gm.graph, self._result_nodes, inputs, self.pool.handles[-1])

    def _record(self, plan: InputPlan, inputs: Sequence[Any], avoid: AvoidSpans | None) -> CapturedGraph:
        if self._stream is None or self._stream in side_streams.native().values():
            self._stream = side_streams.draw(0, {torch.npu.current_stream()})
        stream = self._stream

        def into(pool: PoolHandle) -> CapturedGraph:
            recording = Recording(self._gm, plan.updates, self._around, avoid)
            with scopes.inherited({MAIN: stream}):
                return CapturedGraph(recording, inputs, plan, self._options, stream, pool)

        return self.pool.capture(into)
