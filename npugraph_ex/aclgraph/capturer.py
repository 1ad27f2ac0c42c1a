"""`Capturer`: captures one compiled graph for the inputs of a call, so that no replay overwrites another capture's results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import fx

from npugraph_ex.aclgraph import scopes
from npugraph_ex.aclgraph.capture_pool import PoolHandle
from npugraph_ex.aclgraph.captured_graph import CapturedGraph, CaptureMemory, refuse_in_a_capture
from npugraph_ex.aclgraph.frame_memory import FrameMemory
from npugraph_ex.aclgraph.inputs import InputPlan
from npugraph_ex.aclgraph.recording import Recording
from npugraph_ex.aclgraph.result_banks import ResultBank, bytes_of_results, makers_of_results
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
        memory: where the captures lie.

    Attributes:
        memory: likewise.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        around: Callable[[GraphFunction], GraphFunction],
        options: Options,
        number: int,
        kernels: StaticKernels | None,
        memory: FrameMemory,
    ) -> None:
        self.memory = memory
        self._gm = gm
        self._around = around
        self._options = options
        self._number = number
        self._kernels = kernels

    def banks(self, plan: InputPlan) -> tuple[ResultBank, ...]:
        """Where the results of a key may lie, see `FrameMemory.banks`."""
        large = 0 if plan.sizes_vary else bytes_of_results(self._makers)
        return self.memory.banks(sizes_vary=plan.sizes_vary, bytes_of_results=large)

    @roomy
    def capture(
        self, plan: InputPlan, inputs: Sequence[Any], numbers: tuple[Any, ...], reason: str, bank: ResultBank | None
    ) -> CapturedGraph:
        """Capture the graph and publish a record of it.

        Args:
            plan: what happens to each input.
            inputs: the call's inputs.
            numbers: the sizes and scalars of the graph key, for the record.
            reason: why no earlier capture serves the call, for the record.
            bank: where the results lie; None if each call copies them.

        Raises:
            CaptureError: the device refused.
            BrokenPromiseError: an operator does not keep its contract.
        """
        with torch.npu.device(plan.device):
            refuse_in_a_capture()
            if self._kernels is not None:
                self._kernels.prepare(inputs)
            graph = self._record(plan, inputs, bank)
        self.memory.pool.drop_retired()
        publish(numbers, reason, self._number)
        logger.debug("captured a graph because of %s", reason)
        return graph

    @cached_property
    def _makers(self) -> frozenset[fx.Node]:
        return makers_of_results(self._gm.graph)

    def _record(self, plan: InputPlan, inputs: Sequence[Any], bank: ResultBank | None) -> CapturedGraph:
        stream = self.memory.stream()
        results = bank.pool if bank is not None else self.memory.copied
        # Otherwise results that each call copies lie in the pool of the capture, which lives as long as the capture.
        keeper = results or (self.memory.pool if bank is None and self._options.reuse_graph_pool_in_same_fx else None)

        def into(pool: PoolHandle) -> CapturedGraph:
            in_bank = partial(results.instead_of, pool) if results is not None else None
            makers = self._makers if results is not None else ()
            recording = Recording(self._gm, plan.updates, self._around, makers, in_bank)
            with scopes.inherited({MAIN: stream}):
                memory = CaptureMemory(pool, self.memory.inputs, keeper)
                return CapturedGraph(recording, inputs, plan, self._options, stream, memory)

        return self.memory.pool.capture(into)
