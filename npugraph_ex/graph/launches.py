"""Which nodes start work on the device, how many a graph has, and what they read and write."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import fx
from torch._ops import OpOverload

from npugraph_ex.graph.composites import kernels_of_call
from npugraph_ex.graph.inplace import inplace_overload
from npugraph_ex.graph.operators import is_view, tensor_leaves
from npugraph_ex.graph.sizes import known

_NOT_KERNELS = frozenset({"air", "npugraph_ex", "prim", "prims", "_operator"})

_UNDECLARED_VIEW = torch.ops.aten._unsafe_view.default  # noqa: SLF001 - its name; torch writes it for a reshape of a fresh copy


def launches(node: fx.Node) -> bool:
    """Whether a node starts work on the device: it calls an operator that is no view and does not order work."""
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace in _NOT_KERNELS or target is _UNDECLARED_VIEW:
        return False
    return not is_view(node)


def kernels_of(node: fx.Node) -> int:
    """How many kernels a node starts: several for an operator that the device takes apart."""
    return kernels_of_call(node) if launches(node) else 0


def count_kernels(graph: fx.Graph) -> int:
    """The number of kernels that ``graph`` will start."""
    return sum(map(_kernels_to_be, filter(launches, graph.nodes)))


def _kernels_to_be(node: fx.Node) -> int:
    """As `kernels_of_call`, once the passes let the operator write into its operand instead of a copy."""
    return 1 if inplace_overload(node.target) is not None else kernels_of_call(node)


def bytes_of(node: fx.Node) -> int:
    """What a node that starts work reads and writes, each tensor once; for symbolic sizes, those compiled for."""
    return sum(_bytes_of(leaf) for one in (*node.all_input_nodes, node) for leaf in tensor_leaves(one))


@dataclass(frozen=True)
class Launched:
    """Work on the device.

    Attributes:
        kernels: how many; of an operator with a form in place, those of that form, which the passes give it.
        bytes: what they read and write, each tensor once for each kernel; for symbolic sizes, those compiled for.
    """

    kernels: int = 0
    bytes: int = 0

    @classmethod
    def of(cls, nodes: Iterable[fx.Node]) -> Launched:
        """What these nodes start."""
        starting = [node for node in nodes if launches(node)]
        return cls(sum(map(_kernels_to_be, starting)), sum(map(bytes_of, starting)))

    @classmethod
    def of_graph(cls, graph: fx.Graph) -> Launched:
        """What a call of a graph starts after all passes."""
        return cls(sum(map(kernels_of, graph.nodes)), cls.of(graph.nodes).bytes)

    def __add__(self, other: Launched) -> Launched:
        return Launched(self.kernels + other.kernels, self.bytes + other.bytes)

    def __sub__(self, other: Launched) -> Launched:
        return Launched(self.kernels - other.kernels, self.bytes - other.bytes)


NOTHING = Launched()


def _bytes_of(tensor: torch.Tensor) -> int:
    """Bytes of memory under a tensor; a dimension that is repeated in place is read once."""
    kept = [known(size) for size, step in zip(tensor.shape, tensor.stride(), strict=True) if known(step) != 0]
    return math.prod(kept) * tensor.element_size()
