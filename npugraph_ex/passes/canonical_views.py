"""Shortens chains of views that functionalization leaves behind, so that what is the same bytes is the same node.

`as_strided` names bytes of a storage whatever view it is applied to, so one on top of another is the upper one alone. What
then turns out to be its input itself goes by the rule of identity views.

A scatter into all of a base is a copy over it: `x[:] = y` and `x[:].add_(1)` come as such. Nothing of the base is left in
the result, so that reinplacing may compute the values in the base's own memory.
"""

from __future__ import annotations

import torch
from torch import fx

from npugraph_ex.graph import noops
from npugraph_ex.graph.metadata import difference
from npugraph_ex.passes.base import PassContext

_aten = torch.ops.aten
_as_strided = _aten.as_strided.default
_WITH_OFFSET = 4  # (input, size, stride, offset): without an offset the input's own is meant


def run(gm: fx.GraphModule, context: PassContext) -> None:  # noqa: ARG001 - every pass takes it
    """Shorten the view chains of ``gm.graph``, and make copies of its scatters into everything."""
    for node in gm.graph.find_nodes(op="call_function", target=_as_strided):
        if len(node.args) == _WITH_OFFSET and isinstance(node.args[0], fx.Node):
            node.replace_input_with(node.args[0], _storage_owner(node.args[0]))
    for node in gm.graph.find_nodes(op="call_function", target=_aten.slice_scatter.default):
        base, source, *_ = node.args
        if _is_like(base, source) and _is_like(base, node):
            node.target, node.args, node.kwargs = _aten.copy.default, (base, source), {}
    noops.remove(gm.graph)


def _is_like(base: fx.node.Argument, value: fx.node.Argument) -> bool:
    """Whether both are tensors of one shape, layout and dtype; a slice as long as its base is all of it, whatever its step."""
    if not isinstance(base, fx.Node) or not isinstance(value, fx.Node):
        return False
    return difference(base.meta["val"], value.meta["val"]) is None


def _storage_owner(node: fx.Node) -> fx.Node:
    """Follow `as_strided`, whose result has its input's dtype, down to the first node that is something else."""
    while node.op == "call_function" and node.target is _as_strided and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node
