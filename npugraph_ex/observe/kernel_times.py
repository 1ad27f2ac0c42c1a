"""The modelled time of each kernel of a graph. Imports torch, which `modelled` must not: the command line reads that one first."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import fx

from npugraph_ex.graph.operators import tensor_leaves
from npugraph_ex.graph.sizes import known
from npugraph_ex.observe.modelled import chip
from npugraph_ex.operators import OPERATORS


def kernel_times() -> Callable[[fx.Node], float]:
    """A function that gives the microseconds of the kernel that a node starts, on all cores, as the modelled clock counts them.

    Products count where the operator is a matrix product. Those inside another operator, such as attention, are counted only
    as they run, so that operator counts with its bytes.
    """
    from npu_emulator.clock.roofline import Roofline

    factors = {name: record.first_factor for name, record in OPERATORS.items() if record.first_factor is not None}
    model = Roofline(chip(), factors)

    placeholder = functools.cache(_placeholder)  # for this compilation, whose fake mode it would keep

    def sized(tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the sizes that were compiled for; one without symbols is as good as such."""
        numbers = (*tensor.shape, *tensor.stride())
        if all(isinstance(number, int) for number in numbers):
            return tensor
        found = tuple(map(known, numbers))
        return placeholder(found[: tensor.dim()], found[tensor.dim() :], tensor.dtype)

    def microseconds(node: fx.Node) -> float:
        reads = [sized(leaf) for source in node.all_input_nodes for leaf in tensor_leaves(source)]
        return model.kernel_us(str(node.target), reads, [*map(sized, tensor_leaves(node))])

    return microseconds


def _placeholder(sizes: tuple[int, ...], steps: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(sizes, steps, dtype=dtype, device="meta")
