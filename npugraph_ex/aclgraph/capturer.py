"""`Capturer`: captures one compiled graph for the inputs of a call, so that no replay overwrites another capture's results."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import fx

from npugraph_ex.aclgraph import scopes, side_streams
from npugraph_ex.aclgraph.capture_pool import CapturePool, PoolHandle
from npugraph_ex.aclgraph.captured_graph import CapturedGraph, CaptureMemory, refuse_in_a_capture
from npugraph_ex.aclgraph.inputs import InputMemory, InputPlan
from npugraph_ex.aclgraph.recording import Recording
from npugraph_ex.aclgraph.result_banks import ResultBank, ResultPool, makers_of_results
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
        device: the index of the device.

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
        device: int,
    ) -> None:
        self.pool = CapturePool(options.use_graph_pool, shared=options.reuse_graph_pool_in_same_fx)
        self._gm = gm
        self._around = around
        self._options = options
        self._number = number
        self._kernels = kernels
        self._device = device
        self._stream: torch.npu.Stream | None = None
        self._memory = InputMemory()
        self._banks: tuple[ResultBank, ...] = ()
        # Into a caller's pool, graphs of other functions may write between a replay and the copies of its results.
        self._copied = ResultPool(device) if options.use_graph_pool is not None else None
        self._users: weakref.WeakSet[object] = weakref.WeakSet()

    def banks(self, captures: object, plan: InputPlan) -> tuple[ResultBank, ...]:
        """The two banks for the results of one key.

        The captures of all keys share two. A graph without varying sizes has one key in most programs. While the key is alone,
        no other capture writes into the pool, so the results of its first capture may lie there, which saves a pool.

        Args:
            captures: the captures of the key, which take up the pool until they are gone or `leave`.
            plan: what happens to each input.
        """
        alone = not (self._users or plan.sizes_vary or self._options.use_graph_pool)
        self._users.add(captures)
        if not self._options.reuse_graph_pool_in_same_fx:
            return ResultBank(None), ResultBank(None)
        if not self._banks:
            self._banks = ResultBank(ResultPool(self._device)), ResultBank(ResultPool(self._device))
        return (ResultBank(None), self._banks[0]) if alone else self._banks

    def leave(self, captures: object) -> None:
        """The captures of a key will not be replayed any more."""
        self._users.discard(captures)

    def free(self) -> None:
        """Free the memory of the captures, where none is left. Live results stay."""
        self.pool.free()
        self._banks, self._memory = (), InputMemory()

    def pools(self) -> list[PoolHandle]:
        """The memory pools of the captures and of their results."""
        pools = (self._copied, *(bank.pool for bank in self._banks))
        results = [pool.handle for pool in pools if pool is not None]
        return [*self.pool.handles, *(handle for handle in results if handle is not None)]

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
        self.pool.drop_retired()
        publish(numbers, reason, self._number)
        logger.debug("captured a graph because of %s", reason)
        return graph

    @cached_property
    def _makers(self) -> frozenset[fx.Node]:
        return makers_of_results(self._gm.graph)

    def _record(self, plan: InputPlan, inputs: Sequence[Any], bank: ResultBank | None) -> CapturedGraph:
        if self._stream is None or self._stream in side_streams.native().values():
            self._stream = side_streams.draw(0, {torch.npu.current_stream()})
        stream = self._stream
        results = bank.pool if bank is not None else self._copied
        # Otherwise results that each call copies lie in the pool of the capture, which lives as long as the capture.
        keeper = results or (self.pool if bank is None and self._options.reuse_graph_pool_in_same_fx else None)

        def into(pool: PoolHandle) -> CapturedGraph:
            in_bank = partial(results.instead_of, pool) if results is not None else None
            makers = self._makers if results is not None else ()
            recording = Recording(self._gm, plan.updates, self._around, makers, in_bank)
            with scopes.inherited({MAIN: stream}):
                memory = CaptureMemory(pool, self._memory, keeper)
                return CapturedGraph(recording, inputs, plan, self._options, stream, memory)

        return self.pool.capture(into)
