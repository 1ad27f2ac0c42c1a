"""`ResultBank`: memory for the results of one call, which the captures of all sizes share.

A compiled graph, or several of one function, have two banks, each a memory pool of its own. A capture computes its results in
one of them and everything else in the pool of the captures. It is replayed only while no caller holds a result in its bank. So a
replay overwrites no live result, and results of all sizes take the memory of the largest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import fx
from torch.utils import _pytree as pytree

from npugraph_ex.aclgraph import _npu_private
from npugraph_ex.aclgraph.capture_pool import PoolHandle
from npugraph_ex.graph.memory.aliases import AliasFacts, output_values

if TYPE_CHECKING:
    from npugraph_ex.aclgraph.outputs import Outputs


class ResultPool:
    """A memory pool that lives as long as this object. Each result that lies in it holds the object.

    Attributes:
        handle: torch_npu's name of the pool; None until something lies in it.
    """

    def __init__(self, device: int) -> None:
        self.handle: PoolHandle | None = None
        self._device = device
        self._release: Callable[[], None] | None = None

    def __del__(self) -> None:
        if self._release is not None:
            self._release()

    @contextmanager
    def instead_of(self, pool: PoolHandle) -> Iterator[None]:
        """Within the block the capture that this thread makes allocates here, and not in ``pool``."""
        if self.handle is None:
            self.handle = torch.npu.graph_pool_handle()
            self._release = _npu_private.keep_pool(self._device, self.handle)
        with _npu_private.leaving_pool(self._device, pool), _npu_private.joining_pool(self._device, self.handle):
            yield


class ResultBank:
    """Memory for the results of one call.

    Args:
        pool: where the results lie; None if each capture keeps its results in a pool of its own.

    Attributes:
        last: the results of the call that used the bank last, of whatever size.
    """

    def __init__(self, pool: ResultPool | None) -> None:
        self.pool = pool
        self.last: Outputs | None = None

    def is_free(self) -> bool:
        """Whether no caller holds a result that lies here."""
        return self.last is None or not self.last.has_live_results()


def makers_of_results(graph: fx.Graph) -> frozenset[fx.Node]:
    """The nodes that allocate the memory of the graph's results."""
    facts = AliasFacts(graph)
    missing = {root for value in output_values(graph) if isinstance(value, fx.Node) for root in facts.roots(value)}
    makers = []
    for node in graph.nodes:
        roots = missing & facts.roots(node) if node.op != "output" else set()
        if roots:
            missing -= roots
            makers.append(node)
    return frozenset(node for node in makers if node.op == "call_function")


def bytes_of_results(makers: Iterable[fx.Node]) -> int:
    """The bytes that the makers of a graph's results allocate, if no size varies."""
    values = (leaf for node in makers for leaf in pytree.tree_leaves(node.meta.get("val")))
    return sum(value.untyped_storage().nbytes() for value in values if isinstance(value, torch.Tensor))
