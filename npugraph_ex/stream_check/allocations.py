"""Memory that a graph frees on one stream while another may still use it.

The caching allocator reuses a block on the stream for which it was allocated, as soon as the host has freed it: after its
last use in the node list, whatever other streams still do. `record_stream` registers another stream with the allocator.
Allocations of up to 1 MiB and larger ones come from different pools. The allocator may choose any free block of a pool, so
the check assumes that every free block is possible.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import fx

from npugraph_ex.graph.memory.aliases import AliasFacts, output_values, tensor_leaves
from npugraph_ex.graph.memory.regions import UNKNOWN
from npugraph_ex.graph.streams.order import Clocks
from npugraph_ex.stream_check.accesses import Past, Touch

_SMALL = 1 << 20
"""The largest block, in bytes, that the caching allocator takes from its pool of small ones (kSmallSize)."""


@dataclass
class _Allocation:
    """One allocation: the stream and the position from which it may be reused, and the other streams that used it."""

    value: fx.Node
    is_small: bool | None
    freed_at: int
    uses: dict[str, Past] = field(default_factory=dict)
    """The last use on each other stream without `record_stream`."""
    recorded_streams: set[str] = field(default_factory=set)


class Allocations:
    """The allocations of one graph, during a walk in list order.

    Args:
        graph: its nodes carry fake tensors in ``meta["val"]``.
        facts: its aliases.
    """

    def __init__(self, graph: fx.Graph, facts: AliasFacts) -> None:
        self._facts = facts
        self._position = {node: index for index, node in enumerate(graph.nodes)}
        self._last_use: dict[int, int] = {}
        for node, position in self._position.items():
            last = max((self._position[user] for user in node.users), default=position)
            for root in facts.roots(node) if tensor_leaves(node) else ():
                self._last_use[root] = max(last, self._last_use.get(root, last))
        self._kept = {root for node in output_values(graph) if isinstance(node, fx.Node) for root in facts.roots(node)}
        self._blocks: dict[int, tuple[str, _Allocation]] = {}
        self._used_elsewhere: dict[str, list[_Allocation]] = defaultdict(list)

    def allocated(self, node: fx.Node, touch: Touch, stream: str) -> None:
        """``node`` allocates the memory of ``touch`` on ``stream``."""
        root = touch.region.root
        if root == UNKNOWN or root in self._kept:
            return
        block = _Allocation(node, _is_small(self._facts.storage_bytes(root)), self._last_use[root])
        self._blocks[root] = (stream, block)

    def used(self, past: Past) -> None:
        """A node touches memory. Only touches of another stream's memory count."""
        owner, block = self._blocks.get(past.touch.region.root, ("", None))
        stream = past.moment.stream
        if block is None or stream == owner or stream in block.recorded_streams:
            return
        if not block.uses:
            self._used_elsewhere[owner].append(block)
        block.uses[stream] = past

    def record_stream(self, value: fx.Node, stream: str) -> None:
        """A `record_stream` registers with the allocator that ``stream`` uses ``value``."""
        for root in self._facts.roots(value):
            if root in self._blocks:
                block = self._blocks[root][1]
                block.recorded_streams.add(stream)
                block.uses.pop(stream, None)

    def reused(self, node: fx.Node, touch: Touch, stream: str, clocks: Clocks) -> Iterator[tuple[fx.Node, Past]]:
        """Freed allocations that ``node`` may get for ``touch`` although another stream may still use them, each once.

        Yields:
            The value that lay in the block, and its use that may not be over.
        """
        here, is_small = self._position[node], _is_small(self._facts.storage_bytes(touch.region.root))
        waiting = []
        for block in self._used_elsewhere[stream]:
            block.uses = {other: use for other, use in block.uses.items() if not clocks.knows(stream, use.moment)}
            different_pool = None not in (is_small, block.is_small) and is_small != block.is_small
            if block.freed_at >= here or different_pool:
                waiting.append(block)
                continue
            for use in block.uses.values():
                yield block.value, use
        self._used_elsewhere[stream] = [block for block in waiting if block.uses]  # `used` adds it again


def _is_small(size: object) -> bool | None:
    return size <= _SMALL if isinstance(size, int) else None
