"""Shortens chains of views that functionalization leaves behind, so that what is the same bytes is the same node.

`as_strided` names bytes of a storage whatever view it is applied to, so one on top of another is the upper one alone. What
then turns out to be its input itself goes by the rule of identity views.
"""

from __future__ import annotations

import torch
from torch import fx

from npugraph_ex.passes import noop_removal
from npugraph_ex.passes.pass_ import PassContext

_as_strided = torch.ops.aten.as_strided.default
_WITH_OFFSET = 4  # (input, size, stride, offset): without an offset the input's own is meant


def run(gm: fx.GraphModule, context: PassContext) -> None:
    """Shorten the view chains of ``gm.graph``."""
    for node in gm.graph.find_nodes(op="call_function", target=_as_strided):
        if len(node.args) == _WITH_OFFSET and isinstance(node.args[0], fx.Node):
            node.replace_input_with(node.args[0], _storage_owner(node.args[0]))
    noop_removal.run(gm, context)


def _storage_owner(node: fx.Node) -> fx.Node:
    """Follow `as_strided`, whose result has its input's dtype, down to the first node that is something else."""
    while node.op == "call_function" and node.target is _as_strided and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node
