"""Finds inputs whose place in their storage decides whether AOT's graph is right: `as_strided` is combined with a write.

AOT computes the new value of a written input in memory of its own, and copies its elements back. So a write through
`as_strided` outside of the input is lost. An offset of `as_strided` counts from the beginning of the storage; in the new value
it finds the same elements only if the input begins in its storage where the value begins in its own. No guard checks that.
`shared_inputs` compares the place at each call.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from npugraph_ex import _torch_private
from npugraph_ex.graph.metadata import difference, fake_mode_of, same_numbers
from npugraph_ex.graph.operators import counts_from_the_storage, reaches_beyond
from npugraph_ex.graph.parts import part_written, writes_a_part
from npugraph_ex.versions.repair import Repair

REPAIR = Repair(
    fault="A write through `as_strided` is lost, or goes to other elements, if the input is a part of its storage.",
    threads=("pytorch#104505", "pytorch#140171"),
    test="tests/frontend/test_as_strided_writes.py",
)

NOWHERE = -1
"""The required offset of an input for which the graph is wrong at every offset."""


def required_offsets(graph: fx.Graph, examples: Sequence[Any], written: Iterable[int]) -> dict[int, int]:
    """Where inputs must begin in their storage so that the graph is right.

    Args:
        graph: AOT's graph.
        examples: the inputs of the Dynamo graph, as fake tensors.
        written: positions of inputs that the graph writes, without inputs that a base replaces.

    Returns:
        The first element, or `NOWHERE`, by position. Empty for nearly all graphs.
    """
    owners: dict[int, fx.Node] = {}  # by storage, the node that made it
    demands = []
    for node in graph.nodes:
        if not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        owners.setdefault(_torch_private.storage_key(node.meta["val"]), node)
        if not reaches_beyond(node):
            continue
        base = node.all_input_nodes[0].meta["val"]
        owner = owners[_torch_private.storage_key(base)]
        if writes_a_part(node) and not _is_within(part_written(node, fake_mode_of(graph)), base):
            demands.append((owner.meta["val"], NOWHERE))
        elif counts_from_the_storage(node) and (writes_a_part(node) or owner.op != "placeholder"):
            demands.append((owner.meta["val"], base.storage_offset()))
    found = {position: _required(examples[position], demands) for position in written} if demands else {}
    return {position: offset for position, offset in found.items() if offset is not None}


def _is_within(part: torch.Tensor, base: torch.Tensor) -> bool:
    """Whether every element of ``part`` is known to be one of ``base``, for all values of the symbols among their sizes."""
    if difference(base, part) is None and same_numbers((base.storage_offset(),), (part.storage_offset(),)):
        return True
    start, first = base.storage_offset(), part.storage_offset()
    has_no_gaps = statically_known_true(_extent(base) == base.numel())
    starts_inside = has_no_gaps and statically_known_true(first >= start)
    return starts_inside and statically_known_true(first + _extent(part) <= start + base.numel())


def _extent(tensor: torch.Tensor) -> Any:
    """The number of elements from the first one in memory to the last one."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _required(example: torch.Tensor, demands: Sequence[tuple[torch.Tensor, Any]]) -> int | None:
    """The offset of ``example`` if it meets the demands of all values that may be a state of it; None if there are none.

    A state of an input has its shape, dtype and strides. The graph does not say more: a value that the program computes for
    itself looks the same.
    """
    wanted = [offset for value, offset in demands if difference(example, value) is None]
    if not wanted:
        return None
    offset = example.storage_offset()
    if type(offset) is not int or any(type(one) is not int or one != offset for one in wanted):
        return NOWHERE
    return offset
