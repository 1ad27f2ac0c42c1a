"""`CompiledGraph`: the function that a caller calls. It owns the state of a call; docs/explanation/a-call.md draws the states.

Each call goes one of three ways: it replays the captures of the last call, it finds or makes captures by graph key, or it
runs the graph operator by operator.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import fx

from npugraph_ex import _torch_private
from npugraph_ex.aclgraph import _npu_private, scopes
from npugraph_ex.aclgraph.address_guard import AddressGuard, FrozenAddressGuard
from npugraph_ex.aclgraph.capture_cache import CaptureCache, GraphKey, KeyRunner
from npugraph_ex.aclgraph.capture_set import CaptureSet
from npugraph_ex.aclgraph.capturer import Capturer
from npugraph_ex.aclgraph.first_run import Original, first_run_checked
from npugraph_ex.aclgraph.frame_memory import FrameMemory
from npugraph_ex.aclgraph.inputs import InputPlan
from npugraph_ex.aclgraph.operator_contracts import UndeclaredEffectError
from npugraph_ex.aclgraph.scalar_churn import ScalarChurn
from npugraph_ex.aclgraph.stable_inputs import StableInputs
from npugraph_ex.aclgraph.static_kernels import StaticKernels
from npugraph_ex.config.options import Options
from npugraph_ex.errors import CaptureError
from npugraph_ex.observe.logger import logger
from npugraph_ex.report import graphs


class _LastCall(NamedTuple):
    """The captures that served the last call. They serve the next call if it has these numbers and the guard matches."""

    numbers: tuple[Any, ...]
    guard: AddressGuard | FrozenAddressGuard
    runner: KeyRunner


class PinnedCall:
    """A graph key's captures, for a caller who knows that a call has this key: what such a call costs does not grow with the graph.

    Args:
        graph: the compiled graph.
        key: the call's key.
        last: the call that is pinned.
        epoch: how often the graph had dropped captures then.
    """

    def __init__(self, graph: CompiledGraph, key: GraphKey, last: _LastCall, epoch: int) -> None:
        self.graph = graph
        self.key = key
        self.last = last
        self.epoch = epoch


class _Unboxed:
    """Runs a function of the graph's inputs, in place of a key's captures."""

    def __init__(self, function: scopes.GraphFunction) -> None:
        self._function = function

    def run(self, inputs: list[Any]) -> list[Any]:
        """Run with ``inputs``."""
        return list(self._function(*inputs))


def invalidate() -> int:
    """Drop every captured graph of this process; each graph is captured again at its next call.

    For a program that changed something which a capture contains and which the library cannot see, such as memory behind a
    custom operator. Weights that the option `join_projections` joined are joined anew, too.

    Returns:
        How many graph keys were dropped.
    """
    for listener in _listeners:
        listener()
    return sum(graph.invalidate() for graph in _living())


def when_invalidated(listener: Callable[[], None]) -> None:
    """Call ``listener`` whenever the program calls `invalidate`."""
    _listeners.append(listener)


def pool_bytes() -> dict[int, int]:
    """The bytes in the memory pools of each compiled graph that captured something, by the graph's number.

    Graphs may share pools; the bytes of such a pool count for the first of these graphs.
    """
    graphs_by_number = sorted(_living(), key=lambda graph: graph.number)
    pools = {graph.number: graph.memory.pools() for graph in graphs_by_number if graph.memory.pool.handles}
    sizes: dict[tuple[int, int], int] = {}
    for segment in torch.npu.memory_snapshot() if pools else ():
        handle = tuple(segment["segment_pool_id"])
        sizes[handle] = sizes.get(handle, 0) + segment["total_size"]
    return {number: sum([sizes.pop(handle, 0) for handle in handles]) for number, handles in pools.items()}


def peak_bytes() -> int | None:
    """The most bytes that tensors took at once on the current device; None before a device is used."""
    return torch.npu.max_memory_allocated() if torch.npu.is_initialized() else None


def _living() -> list[CompiledGraph]:
    return [graph for reference in list(_alive) if (graph := reference()) is not None]


_listeners: list[Callable[[], None]] = []
_alive: set[weakref.ref[CompiledGraph]] = set()  # no WeakSet: another thread may add a graph while one is read
"""Every compiled graph that somebody can still call, for `invalidate`. It only empties their caches."""


class CompiledGraph:
    """A captured and replayed FX graph. Several threads may call it; their calls run one after another.

    Args:
        gm: the optimised graph.
        plan: what happens to each input.
        options: the validated options.
        number: the graph's number in `report.graphs`.
        kernels: compiles static kernels before a capture; None if the option is off.
        original: the graph before the passes, from which the graph may have to be compiled again; None if it is unknown.
        memory: where the captures lie; None for memory of its own.

    Attributes:
        memory: where the captures lie, perhaps beside those of other graphs of the function.
    """

    def __init__(  # noqa: PLR0913 - the parts of one graph
        self,
        gm: fx.GraphModule,
        plan: InputPlan,
        options: Options,
        number: int = 0,
        kernels: StaticKernels | None = None,
        original: Original | None = None,
        *,
        memory: FrameMemory | None = None,
    ) -> None:
        self.number = number
        self.gm = gm
        self.plan = plan
        self._options = options
        around = scopes.around(gm)
        self._eager = _Unboxed(around(first_run_checked(gm, original)))
        self._original = original
        self.memory = memory or FrameMemory(plan.device, options)
        self._capturer = Capturer(gm, around, options, number, kernels, self.memory)
        self._cache = CaptureCache(plan, options.capture_limit, self.memory.pool)
        self._churn = ScalarChurn(plan, number)
        self._returned: list[torch.Tensor] = []
        self._last: _LastCall | None = None
        # Runs all calls after the device has refused a capture, or after this graph was compiled again.
        self._instead: KeyRunner | None = None
        self._device = plan.device
        self._current_stream = _npu_private.stream_question()
        self._lock = self.memory.lock
        _alive.add(weakref.ref(self, _alive.discard))

    def keys(self) -> int:
        """How many graph keys have captures."""
        return len(self._cache)

    def invalidate(self, why: str = "") -> int:
        """Drop this graph's captures; return how many graph keys had some.

        Args:
            why: the reason for the next capture, if it is not that the program called `invalidate`.
        """
        with self._lock:
            self._last = None
            if self._instead is self._eager:
                self._instead = None
            return self._cache.clear(why)

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        """Run the graph. Results equal those of eager mode, and no later call changes them."""
        return self.run(list(inputs))

    def pin(self, inputs: list[Any]) -> PinnedCall | None:
        """The captures of the last call, which had these inputs; None if it was not served by captures."""
        with self._lock:
            if self._last is None:
                return None
            key = GraphKey(self._last.numbers, self.plan.addresses(inputs))
            known = self._cache.get(key) is self._last.runner
            return PinnedCall(self, key, self._last, self._cache.epoch) if known else None

    def run_pinned(self, pinned: PinnedCall, inputs: list[Any]) -> Sequence[Any] | None:
        """Run with ``inputs``, whose in-place tensors must lie where they did at the pinned call.

        Returns:
            The results; None, and nothing is done, if the numbers of the key are others now or the captures are gone.
        """
        last = pinned.last
        with self._lock:
            if pinned.epoch != self._cache.epoch:
                return None
            # Without numbers and scopes, the usual case, there is nothing to compare.
            if (last.numbers or scopes.here.opened) and self.plan.numbers(inputs) + scopes.key() != last.numbers:
                return None
            stream = self._current_stream(self._device)
            if stream != self.memory.last_stream:
                self._wait_for_last_call(stream)
            if self._last is not last:
                self._last = last
                self._cache.get(pinned.key)  # which makes the key the most recently used one
            try:
                return last.runner.run(inputs)
            except UndeclaredEffectError:
                return None  # a capture failed before anything was computed; `run` compiles again

    @_torch_private.boxed
    def run(self, inputs: list[Any]) -> Sequence[Any]:
        """Run the graph with the inputs in a list, as AOT passes them."""
        if self._instead is not None:
            return self._instead.run(inputs)
        numbers = self.plan.numbers(inputs) + scopes.key()
        with self._lock:
            stream = self._current_stream(self._device)
            if stream != self.memory.last_stream:
                self._wait_for_last_call(stream)
            last = self._last
            if last is not None and last.numbers == numbers and last.guard.matches(inputs):
                runner = last.runner
                self._churn.captures_without_hit = 0
            else:
                runner = self._find(numbers, inputs)
            try:
                return runner.run(inputs)
            except UndeclaredEffectError as effect:
                if self._original is None:
                    raise
                self._compile_again(effect, self._original)
            except CaptureError as refusal:
                if not self._could_drop_others(refusal):
                    if self._options.require_capture:
                        raise
                    results = self._eager.run(
                        inputs
                    )  # where the program itself is wrong, it raises what is wrong, and nothing else
                    self._give_up(str(refusal), refusal.address)
                    return results
                why, address = str(refusal), refusal.address
            if self._instead is None:
                # Not in the handler: the error, and these two, keep memory of captures.
                del last, runner
                self._drop_others(why, address)
        return self.run(inputs)

    def _find(self, numbers: tuple[Any, ...], inputs: list[Any]) -> KeyRunner:
        """The runner of this key; a new one if the key has none."""
        if self._instead is not None:  # since this thread waits for the lock
            return self._instead
        key = GraphKey(numbers, self.plan.addresses(inputs))
        runner = self._cache.get(key)
        if runner is None and not self._options.require_capture and self._churn.should_run_eagerly(key, self._cache):
            return self._eager
        if runner is None or self._options.force_recapture:
            runner = self._cache.add(key, partial(self._new_runner, numbers))
        else:
            self._churn.captures_without_hit = 0
        if not self._options.force_recapture:
            self._last = _LastCall(numbers, self._guard(inputs, key.addresses), runner)
        return runner

    def _new_runner(self, numbers: tuple[Any, ...], reason: str) -> KeyRunner:
        """The runner of a new key. Its first run captures."""
        make = partial(CaptureSet, self._capturer, self._options, numbers, self._returned)
        return (
            StableInputs(self.plan, make, reason) if self._options.stable_inputs_in_place else make(self.plan, reason)
        )

    def _guard(self, inputs: list[Any], addresses: tuple[int, ...]) -> AddressGuard | FrozenAddressGuard:
        """The guard that the next call checks before it computes its graph key."""
        frozen = self.plan.frozen_parameters(inputs) if self._options.frozen_parameter else ()
        if not frozen:
            return AddressGuard(self.plan.in_place, addresses)
        compared = [at for at in zip(self.plan.in_place, addresses, strict=True) if at[0] not in frozen]
        guard = AddressGuard(*zip(*compared, strict=True)) if compared else AddressGuard((), ())
        return FrozenAddressGuard(frozen, inputs, guard)

    def _wait_for_last_call(self, stream: tuple[int, int, int]) -> None:
        """Order this call after the memory's last one, which ran on another stream, because the two share buffers and results."""
        current = torch.npu.current_stream(self.plan.device)
        if self.memory.last_stream is not None:
            stream_id, device_index, device_type = self.memory.last_stream
            last = torch.npu.Stream(stream_id=stream_id, device_index=device_index, device_type=device_type)
            current.wait_stream(last)
        self.memory.last_stream = stream

    def _give_up(self, why: str, address: str) -> None:
        """Run operator by operator from now on, and free the captures for other sizes. Their results stay."""
        graphs.refused(self.number, why)
        logger.warning(
            "Graph %d runs operator by operator from now on, because %s\nnpugraph_ex.invalidate() tries again; "
            "options={'require_capture': True} raises instead\n%s",
            self.number,
            why,
            address,
        )
        self.invalidate()
        self._free_captures()
        self._instead = self._eager

    def _could_drop_others(self, refusal: CaptureError) -> bool:
        """Whether memory was short for a capture, and captures of other keys have some."""
        may_drop = self.memory.drops_left > 0 or not self._options.require_capture
        short = isinstance(refusal.__cause__, torch.OutOfMemoryError)
        return short and may_drop and sum(graph.keys() for graph in self._sharing()) > 1

    def _drop_others(self, why: str, address: str) -> None:
        """Free the captures of all keys, for a call that needs their memory. Live results stay."""
        if not self.memory.drops_left:
            self._give_up(why, address)
            return
        self.memory.drops_left -= 1
        reason = "the device having been short of memory"
        dropped = sum(graph.invalidate(reason) for graph in self._sharing()) - 1  # the last key has none yet
        self._free_captures()
        logger.warning(
            "Graph %d dropped the captures of %d other sizes, because the device had no memory left for one more; each is "
            "captured again at its next call. Call the largest size first, and all sizes share its memory\n%s",
            self.number,
            dropped,
            address,
        )

    def _compile_again(self, effect: UndeclaredEffectError, original: Original) -> None:
        """Compile the graph again, now that the operator's effect is known, and use that graph instead.

        Nothing of the capture has run.
        """
        effect.remember()
        self.invalidate()
        self._free_captures()
        original.check()
        self._instead = _Unboxed(original.compile())

    def _free_captures(self) -> None:
        """Free the captures that were dropped, and the memory if no graph has others."""
        torch.npu.current_stream(self.plan.device).synchronize()  # a graph must not be freed while it runs
        if any(graph.keys() for graph in self._sharing()):
            self.memory.pool.drop_retired()
        else:
            self.memory.free()

    def _sharing(self) -> list[CompiledGraph]:
        """The graphs whose captures lie in the same memory."""
        return [graph for graph in _living() if graph.memory is self.memory]
