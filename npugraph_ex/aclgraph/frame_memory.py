"""`FrameMemory`: what the captures of all sizes of one function share, so that together they take the memory of the largest.

Dynamo may compile a function once for all sizes or once for each. Either way one memory serves: the compiled graphs of one
function, one `torch.compile` and one device have the same one. They are called one after another, and a replay writes where
earlier replays of others wrote, so the lock and the stream of the last call belong to the memory.
"""

from __future__ import annotations

import threading
import weakref
from types import CodeType

import torch

from npugraph_ex import _torch_private
from npugraph_ex.aclgraph import side_streams
from npugraph_ex.aclgraph.capture_pool import CapturePool, PoolHandle
from npugraph_ex.aclgraph.inputs import InputMemory
from npugraph_ex.aclgraph.result_banks import ResultBank, ResultPool
from npugraph_ex.config.options import Options

MAX_DROPS = 8
"""How often the captures of other sizes are dropped because the device is short of memory: sizes that do not fit beside each
other would be captured at each call."""

_OWN_SEGMENT = 10 << 20
"""torch_npu gives a block of so many bytes a segment of its own, so a pool of its own takes hardly more memory."""


class FrameMemory:
    """The memory and the order of the captures of one or several compiled graphs.

    Args:
        device: the index of the device.
        options: it reads `use_graph_pool` and `reuse_graph_pool_in_same_fx`.
        for_frame: whether graphs that Dynamo compiles later may join.

    Attributes:
        lock: excludes the calls of other threads.
        last_stream: the stream of the last call; None before the first.
        drops_left: how often captures may still be dropped because memory is short.
        pool: the memory pools of the captures.
        inputs: the buffers of copied inputs.
        copied: where results lie that each call copies, if not in ``pool``.
    """

    def __init__(self, device: int, options: Options, *, for_frame: bool = False) -> None:
        self.lock = threading.RLock()
        self.last_stream: tuple[int, int, int] | None = None
        self.drops_left = MAX_DROPS
        self.pool = CapturePool(options.use_graph_pool, shared=options.reuse_graph_pool_in_same_fx)
        self.inputs = InputMemory()
        # Into a caller's pool, graphs of other functions may write between a replay and the copies of its results.
        self.copied = ResultPool(device) if options.use_graph_pool is not None else None
        self._shares_pool = options.reuse_graph_pool_in_same_fx
        self._is_own_pool = options.use_graph_pool is None
        self._for_frame = for_frame
        self._device = device
        self._stream: torch.npu.Stream | None = None
        self._banks: tuple[ResultBank, ...] = ()
        self._users: weakref.WeakSet[object] = weakref.WeakSet()

    def join(self, captures: object) -> None:
        """Note the captures of one key. They take up the pool until they are gone or `leave`."""
        self._users.add(captures)

    def leave(self, captures: object) -> None:
        """The captures of a key will not be replayed any more."""
        self._users.discard(captures)

    def banks(self, *, sizes_vary: bool, bytes_of_results: int) -> tuple[ResultBank, ...]:
        """The two banks for the results of a key that has joined. Ask right before its first capture.

        The captures of all keys share two. A graph without varying sizes has one key in most programs. While the key is alone,
        no other capture writes into the pool, so the results of its first capture may lie there, which saves a pool. Where other
        graphs may join, large results do not lie there: they would be one more beside those in the two banks.

        Args:
            sizes_vary: whether one graph serves calls of several sizes or numbers.
            bytes_of_results: what the key's results take; not read if sizes vary.
        """
        if not self._shares_pool:
            return ResultBank(None), ResultBank(None)
        if not self._banks:
            self._banks = ResultBank(ResultPool(self._device)), ResultBank(ResultPool(self._device))
        apart = sizes_vary or (self._for_frame and bytes_of_results >= _OWN_SEGMENT)
        alone = len(self._users) == 1 and not apart and self._is_own_pool
        return (ResultBank(None), self._banks[0]) if alone else self._banks

    def stream(self) -> torch.npu.Stream:
        """The stream of the captures: the allocator gives memory that was freed on a stream to that stream alone."""
        if self._stream is None or self._stream in side_streams.native().values():
            self._stream = side_streams.draw(0, {torch.npu.current_stream()})
        return self._stream

    def free(self) -> None:
        """Free the memory of the captures, where none is left. Live results stay."""
        self.pool.free()
        self._banks, self.inputs = (), InputMemory()

    def pools(self) -> list[PoolHandle]:
        """The memory pools of the captures and of their results."""
        pools = (self.copied, *(bank.pool for bank in self._banks))
        results = [pool.handle for pool in pools if pool is not None]
        return [*self.pool.handles, *(handle for handle in results if handle is not None)]


def memory_of(frame: _torch_private.Frame | None, device: int, options: Options) -> FrameMemory:
    """The memory for a new graph: that of the frame's earlier graphs, unless an option says where captures lie.

    With `clone_output=False` a graph's next call overwrites its results, and the calls of other graphs do not.

    Args:
        frame: what the graph is compiled from; None if nobody knows.
        device: the index of the device.
        options: the validated options.
    """
    is_own = (
        options.use_graph_pool is not None or not options.reuse_graph_pool_in_same_fx or options.clone_output is False
    )
    if frame is None or is_own:
        return FrameMemory(device, options)
    known = _known.setdefault(frame.compiler, weakref.WeakValueDictionary())
    memory = known.get((frame.code, device))
    if memory is None:
        memory = known[frame.code, device] = FrameMemory(device, options, for_frame=True)
    return memory


_Memories = weakref.WeakValueDictionary[tuple[CodeType, int], FrameMemory]
_known: weakref.WeakKeyDictionary[object, _Memories] = weakref.WeakKeyDictionary()
"""The memory of each frame that has a compiled graph, by the compiler. Dynamo compiles in one thread at a time."""
