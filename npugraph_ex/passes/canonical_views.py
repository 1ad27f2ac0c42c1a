"""Shortens chains of views that functionalization leaves behind, so that equal bytes are one node.

`as_strided` selects bytes of a storage, whatever view it is applied to. So of two in a row only the second matters. If the
result then equals its input, the rule of identity views removes it.

A scatter into all of a base becomes a copy over the base; `x[:] = y` and `x[:].add_(1)` arrive as such scatters. The result
has no element of the base left, so reinplacing may compute the values in the base's own memory.
"""

from __future__ import annotations

import torch
from torch import fx

from npugraph_ex.graph import noops
from npugraph_ex.graph.metadata import difference
from npugraph_ex.passes.base import PassContext

_aten = torch.ops.aten
_as_strided = _aten.as_strided.default
_WITH_OFFSET = 4  # (input, size, stride, offset): no offset means the input's offset


def run(gm: fx.GraphModule, context: PassContext) -> None:  # noqa: ARG001 - every pass takes it
    """Shorten the view chains of ``gm.graph``, and turn scatters into a whole base into copies."""
    for node in gm.graph.find_nodes(op="call_function", target=_as_strided):
        if len(node.args) == _WITH_OFFSET and isinstance(node.args[0], fx.Node):
            node.replace_input_with(node.args[0], _storage_owner(node.args[0]))
    for node in gm.graph.find_nodes(op="call_function", target=_aten.slice_scatter.default):
        base, source, *_ = node.args
        if _is_like(base, source) and _is_like(base, node):
            node.target, node.args, node.kwargs = _aten.copy.default, (base, source), {}
    noops.remove(gm.graph)


def _is_like(base: fx.node.Argument, value: fx.node.Argument) -> bool:
    """Whether both are tensors of one shape, layout and dtype. A slice as long as its base is the whole base, whatever its step."""
    if not isinstance(base, fx.Node) or not isinstance(value, fx.Node):
        return False
    return difference(base.meta["val"], value.meta["val"]) is None


def _storage_owner(node: fx.Node) -> fx.Node:
    """Follow a chain of `as_strided` with one dtype back to the first other node."""
    while node.op == "call_function" and node.target is _as_strided and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node
