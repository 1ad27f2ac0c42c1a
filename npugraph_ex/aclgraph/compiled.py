"""`CompiledGraph`: what a caller calls. It chooses or captures the right ACLGraph, replays it, and hands out results."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import fx

from npugraph_ex import _torch_private
from npugraph_ex.aclgraph import _npu_private, scopes
from npugraph_ex.aclgraph.captured import CapturedGraph, NotBegunError, refuse_in_a_capture
from npugraph_ex.aclgraph.drift import Drift, Plain
from npugraph_ex.aclgraph.footprint import Elsewhere, apart, foreseen
from npugraph_ex.aclgraph.inputs import InputPlan
from npugraph_ex.aclgraph.instances import Instances
from npugraph_ex.aclgraph.places import FrozenPlaces, Places
from npugraph_ex.aclgraph.promises import first_run_checked
from npugraph_ex.aclgraph.recording import Recording
from npugraph_ex.aclgraph.stable import Runner, StableInputs
from npugraph_ex.aclgraph.static_kernels import StaticKernels
from npugraph_ex.config.options import Options
from npugraph_ex.errors import CaptureError
from npugraph_ex.graph.streams.labels import MAIN
from npugraph_ex.observe.logger import logger
from npugraph_ex.report import graphs
from npugraph_ex.report.captures import publish

_Key = tuple[tuple[Any, ...], tuple[int, ...]]


class _Last(NamedTuple):
    """The captures that served the last call, and what the next must have in common with it to be served by them too."""

    numbers: tuple[Any, ...]
    places: Places | FrozenPlaces
    runner: Runner


def invalidate() -> int:
    """Drop every captured graph of this process; each is captured anew when it is next called.

    For those who changed what a capture baked in and nothing here can see, such as memory behind a custom operator.

    Returns:
        How many graph keys were dropped.
    """
    return sum(graph.invalidate() for graph in list(_alive))


def pool_bytes() -> dict[int, int]:
    """What the memory pools hold on the device, by number of the compiled graph; for those that captured something."""
    pools = {graph.number: graph.pools for graph in list(_alive) if graph.pools}
    held: dict[tuple[int, int], int] = {}
    for segment in torch.npu.memory_snapshot() if pools else ():
        handle = tuple(segment["segment_pool_id"])
        held[handle] = held.get(handle, 0) + segment["total_size"]
    return {number: sum([held.get(pool, 0) for pool in joined]) for number, joined in pools.items()}


_alive: weakref.WeakSet[CompiledGraph] = weakref.WeakSet()
"""Every compiled graph that somebody can still call: for `invalidate`, which only empties their caches."""


class CompiledGraph:
    """A captured and replayed FX graph. Safe to call from several threads; calls then run one after another.

    Args:
        gm: the optimised graph.
        plan: what happens to each input.
        options: the validated options.
        number: under which `report.graphs` knows the graph.
        kernels: compiles static kernels before a capture; None where nobody asked for it.

    Attributes:
        pools: the memory pools that its captures live in: one, or one a capture; none before the first capture.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        plan: InputPlan,
        options: Options,
        number: int = 0,
        kernels: StaticKernels | None = None,
    ) -> None:
        self.number = number
        self.gm = gm
        self.plan = plan
        self._around = scopes.around(gm)
        self._uncaptured: scopes.Runner | None = None  # once the device has refused
        self._plain = Plain(self._around(first_run_checked(gm)))
        self._drift = Drift(plan, number)
        self._options = options
        self._kernels = kernels
        self._instances: OrderedDict[_Key, Runner] = OrderedDict()
        self._last: _Last | None = None
        self._ask_stream = _npu_private.stream_question()
        self._lock = threading.RLock()
        self._last_stream: tuple[int, int, int] | None = None
        self._stream: torch.npu.Stream | None = None
        self.pools: list[tuple[int, int]] = [] if options.use_graph_pool is None else [options.use_graph_pool]
        self._spoilt = False  # whether the last pool can be joined no more
        self._result_nodes: list[fx.Node] = []  # which nodes returned results in the last capture
        self._warned = False
        self._dropped = False
        # A memory pool is gone with its last graph, and no graph can join it again; so what is dropped stays until the
        # next capture has joined.
        self._retired: list[Runner] = []
        _alive.add(self)

    def invalidate(self) -> int:
        """Drop this graph's captures; return for how many keys there were some."""
        with self._lock:
            count = len(self._instances)
            self._retired.extend(self._instances.values())
            self._instances.clear()
            self._last = None
            self._dropped = self._dropped or count > 0
            self._uncaptured = None
            return count

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        """Run the graph; results are as in eager mode, and stay as they are whatever is called later."""
        return self.run(list(inputs))

    @_torch_private.boxed
    def run(self, inputs: list[Any]) -> Sequence[Any]:
        """Run the graph with the inputs in a list, as AOT passes them."""
        if self._uncaptured is not None:
            return self._uncaptured(*inputs)
        numbers = self.plan.numbers(inputs) + scopes.key()
        with self._lock:
            here = self._ask_stream(self.plan.device)
            if here != self._last_stream:
                self._follow_last_call(here)
            last = self._last
            if last is not None and last.numbers == numbers and last.places.hold(inputs):
                runner = last.runner
                self._drift.fruitless = 0
            else:
                runner = self._find(numbers, inputs)
            try:
                return runner.run(inputs)
            except CaptureError as refusal:
                if self._options.require_capture:
                    raise
                self._give_up(refusal)
        return self.run(inputs)

    def _find(self, numbers: tuple[Any, ...], inputs: list[Any]) -> Runner:
        """The captures for this call, new ones if there are none yet."""
        key = (numbers, self.plan.addresses(inputs))
        runner = self._instances.get(key)
        if runner is None and not self._options.require_capture and self._drift.gives_up(key, self._instances):
            return self._plain
        if runner is None or self._options.force_recapture:
            runner = self._add(key)
        else:
            self._instances.move_to_end(key)
            self._drift.fruitless = 0
        if not self._options.force_recapture:
            self._last = _Last(numbers, self._places(inputs, key[1]), runner)
        return runner

    def _places(self, inputs: list[Any], addresses: tuple[int, ...]) -> Places | FrozenPlaces:
        """What the next call is compared with first; where it differs, all addresses are."""
        frozen = self.plan.frozen(inputs) if self._options.frozen_parameter else ()
        if not frozen:
            return Places(self.plan.in_place, addresses)
        compared = [at for at in zip(self.plan.in_place, addresses, strict=True) if at[0] not in frozen]
        return FrozenPlaces(frozen, inputs, Places(*zip(*compared, strict=True)) if compared else Places((), ()))

    def _follow_last_call(self, here: tuple[int, int, int]) -> None:
        """Order this call after the last one, which ran on another stream: they share buffers and memory."""
        current = torch.npu.current_stream(self.plan.device)
        if self._last_stream is not None:
            stream_id, device_index, device_type = self._last_stream
            last = torch.npu.Stream(stream_id=stream_id, device_index=device_index, device_type=device_type)
            current.wait_stream(last)
        self._last_stream = here

    def _give_up(self, refusal: CaptureError) -> None:
        """Run operator by operator from now on; what was captured for other sizes is given back, its results stay."""
        graphs.refused(self.number, str(refusal))
        logger.warning(
            "Graph %d runs operator by operator from now on, because %s\nnpugraph_ex.invalidate() tries again; "
            "options={'require_capture': True} raises instead",
            self.number,
            refusal,
        )
        self.invalidate()
        torch.npu.current_stream(self.plan.device).synchronize()  # a graph must not be destroyed while it runs
        self._retired.clear()
        self._spoilt = self._options.use_graph_pool is None  # a pool is gone with its last graph
        self._uncaptured = self._around(first_run_checked(self.gm))

    def _add(self, key: _Key) -> Runner:
        known = self._instances.pop(key, None)
        reason = self._reason(key) if known is None else "the option force_recapture"
        if known is not None:
            self._retired.append(known)
        elif len(self._instances) >= self._options.capture_limit:
            self._retired.append(self._instances.popitem(last=False)[1])
            if not self._warned:
                self._warned = True
                logger.warning(
                    "capture_limit=%d graphs are captured; the least recently used is dropped for each new one (%s)",
                    self._options.capture_limit,
                    reason,
                )
        make = partial(self._instances_for, key)
        watched = self._options.stable_inputs_in_place
        instances = StableInputs(self.plan, make, reason) if watched else make(self.plan, reason)
        self._instances[key] = instances
        return instances

    def _instances_for(self, key: _Key, plan: InputPlan, reason: str) -> Instances:
        return Instances(partial(self._capture, key, plan), reason, self._options)

    def _capture(self, key: _Key, plan: InputPlan, inputs: Sequence[Any], reason: str) -> CapturedGraph:
        with torch.npu.device(self.plan.device):
            refuse_in_a_capture()
            if self._kernels is not None:
                self._kernels.prepare(inputs)
            if self._stream is None:
                self._stream = torch.npu.Stream()
            lends = self._options.clone_output is None
            room = foreseen(self.gm.graph, self._result_nodes, inputs, self.pools[-1]) if lends and self.pools else None
            try:
                graph = self._capture_once(plan, inputs, self._stream, room)
            except NotBegunError:
                if self._options.use_graph_pool is not None:
                    raise
                # What holds the device's streams may be graphs of dropped models that wait for a collection.
                self._retired.clear()
                gc.collect()
                graph = self._capture_once(plan, inputs, self._stream)
            if lends:
                graph = apart(graph, partial(self._capture_once, plan, inputs, self._stream))
                self._result_nodes = graph.footprint.result_nodes()
        self._retired.clear()
        publish(key[0], reason, self.number)
        logger.debug("captured a graph because of %s", reason)
        return graph

    def _capture_once(
        self, plan: InputPlan, inputs: Sequence[Any], stream: torch.npu.Stream, elsewhere: Elsewhere | None = None
    ) -> CapturedGraph:
        opened = not self.pools or self._spoilt or not self._options.reuse_graph_pool_in_same_fx
        if opened:
            self.pools.append(torch.npu.graph_pool_handle())
            self._spoilt = False
        recording = Recording(self.gm, self.plan.updates, self._around, elsewhere)
        try:
            with scopes.inherited({MAIN: stream}):
                return CapturedGraph(recording, inputs, plan, self._options, stream, self.pools[-1])
        except BaseException as error:
            if opened:
                self.pools.pop()  # no graph can join it any more
            self._spoilt = opened or (isinstance(error, NotBegunError) and self._options.use_graph_pool is None)
            raise

    def _reason(self, key: _Key) -> str:
        """Say why none of the captured graphs will do, naming the argument that differs."""
        if not self._instances:
            return "invalidate() having dropped the earlier graphs" if self._dropped else "the first call"
        numbers, addresses = key
        moved: list[str] | None = None
        for known_numbers, known_addresses in self._instances:
            if known_numbers != numbers:
                continue
            names = [
                self.plan.names[position]
                for position, new, old in zip(self.plan.in_place, addresses, known_addresses, strict=True)
                if new != old
            ]
            moved = names if moved is None or len(names) < len(moved) else moved
        if moved is not None:
            return f"a new address of {', '.join(moved)}"
        return f"new sizes or scalars {numbers}"
