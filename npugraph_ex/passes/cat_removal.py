"""Computes the members of a concatenation directly in its memory, so that `cat` copies nothing.

`cat([a, b])` becomes one allocation. A member is computed into its slice if its operator has an `out` form and only the `cat`
uses it; other members are copied there. That saves work only if the slices are contiguous, because for other slices a kernel
writes into temporary memory first. So other concatenations do not change. A member on another stream than the `cat` is
copied, because a write in place would need events between the two streams.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from npugraph_ex import _torch_private
from npugraph_ex.graph.memory.aliases import tensor_leaves
from npugraph_ex.graph.operators import is_filled
from npugraph_ex.graph.streams.events import stream_of
from npugraph_ex.passes.base import PassContext

_aten = torch.ops.aten


def run(gm: fx.GraphModule, context: PassContext) -> None:
    """Replace every concatenation of ``gm.graph`` for which that saves work."""
    del context
    order = {node: position for position, node in enumerate(gm.graph.nodes)}
    for node in gm.graph.find_nodes(op="call_function", target=_aten.cat.default):
        _take_apart(gm.graph, node, order)


def _take_apart(graph: fx.Graph, cat: fx.Node, order: dict[fx.Node, int]) -> None:
    members = cat.args[0]
    result = cat.meta["val"]
    dimension = _dimension(cat, result)
    if not isinstance(members, (list, tuple)) or not _slices_are_contiguous(result, dimension):
        return
    kept = [member for member in members if isinstance(member, fx.Node)]
    # `cat` skips a one-dimensional empty tensor, whatever the other shapes.
    if len(kept) < 2 or any(member.meta["val"].dim() != result.dim() for member in kept):
        return
    times = Counter(kept)
    direct = {member for member in kept if times[member] == 1 and _can_write_out(member, cat, result)}
    if not direct:
        return
    first = min(direct, key=lambda member: order[member])
    with graph.inserting_before(first):
        sizes, strides = list(result.size()), list(result.stride())
        whole = graph.call_function(
            _aten.empty_strided.default, (sizes, strides), {"dtype": result.dtype, "device": result.device}
        )
    _label(whole, cat)
    whole.meta["val"] = result  # another concatenation may take this one as a member
    _fill(graph, cat, whole, kept, direct, dimension)
    cat.replace_all_uses_with(whole)
    graph.erase_node(cat)
    for member in direct:  # after `cat`, whose arguments each removal would copy
        graph.erase_node(member)


def _fill(
    graph: fx.Graph, cat: fx.Node, whole: fx.Node, members: Sequence[fx.Node], direct: set[fx.Node], dimension: int
) -> None:
    """Write every member into its slice of ``whole``."""
    start = 0
    for member in members:
        stop = start + member.meta["val"].size(dimension)
        anchor = member if member in direct else cat
        with graph.inserting_before(anchor):
            part = graph.call_function(_aten.slice.Tensor, (whole, dimension, start, stop))
            if member in direct:
                out = _out_overload(member.target)
                assert out is not None, "members are direct only if they have an out form"  # noqa: S101 - for the type checker
                overload, name = out
                new = graph.call_function(overload, member.args, {**member.kwargs, name: part})
            else:
                new = graph.call_function(_aten.copy_.default, (part, member))
        _label(part, anchor)
        _label(new, anchor)
        new.meta["val"] = member.meta["val"]  # its result has this metadata, at another address
        start = stop


def _label(new: fx.Node, model: fx.Node) -> None:
    new.meta = {key: value for key, value in model.meta.items() if key not in {"val", "tensor_meta"}}


def _dimension(cat: fx.Node, result: torch.Tensor) -> int:
    dimension: Any = cat.args[1] if len(cat.args) > 1 else cat.kwargs.get("dim", 0)
    return int(dimension) % max(result.dim(), 1)


def _slices_are_contiguous(result: torch.Tensor, dimension: int) -> bool:
    """Whether cutting along ``dimension`` gives contiguous pieces: all outer sizes are one and all sizes are known."""
    sizes = list(result.size())
    if not all(isinstance(size, int) for size in sizes) or not result.is_contiguous():
        return False
    return result.numel() > 0 and all(size == 1 for size in sizes[:dimension])


def _can_write_out(member: fx.Node, cat: fx.Node, result: torch.Tensor) -> bool:
    """Whether ``member`` can be computed into its slice: same dtype, used by the ``cat`` alone, an out form exists."""
    leaves = tensor_leaves(member)
    return (
        member.op == "call_function"
        and set(member.users) == {cat}
        and stream_of(member) == stream_of(cat)
        and len(leaves) == 1
        and leaves[0].dtype == result.dtype
        and leaves[0].is_contiguous()
        and isinstance(member.target, OpOverload)
        and _out_overload(member.target) is not None
    )


@functools.cache
def _out_overload(functional: OpOverload) -> tuple[OpOverload, str] | None:
    """The out form of an operator with a kernel on the device, and the name of its out argument."""
    schema = _torch_private.schema(functional)
    tensors = [str(value.type) for value in schema.returns]
    if schema.is_mutable or tensors != ["Tensor"] or schema.returns[0].alias_info is not None:
        return None
    names = [(argument.name, str(argument.type)) for argument in schema.arguments]
    packet = functional.overloadpacket
    for overload in packet.overloads():
        candidate = getattr(packet, overload)
        arguments = _torch_private.schema(candidate).arguments
        outs = [argument for argument in arguments if is_filled(candidate, argument)]
        if len(outs) != 1 or [(a.name, str(a.type)) for a in arguments if a not in outs] != names:
            continue
        if _torch_private.has_device_kernel(candidate):
            return candidate, outs[0].name
    return None
