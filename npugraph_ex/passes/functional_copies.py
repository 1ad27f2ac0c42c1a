"""Makes functional copies that were not reinplaced plain copies: clones of their source, or else copies into new memory.

Functionalization writes `x.copy_(y)` as `copy(x, y)`, of which the operator first copies the memory of `x`, up to its last
element and with whatever lies before it. Only `as_strided` would show that memory to the program, and nobody guards where in
its storage `x` begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from npugraph_ex.graph.memory.aliases import AliasFacts, counted_storages
from npugraph_ex.graph.metadata import derive, difference, fake_mode_of
from npugraph_ex.passes.base import PassContext

_copy, _clone, _fill = torch.ops.aten.copy.default, torch.ops.aten.clone.default, torch.ops.aten.copy_.default


def run(gm: fx.GraphModule, context: PassContext) -> None:  # noqa: ARG001 - every pass takes it
    """Replace `copy(x, y)` by `clone(y)` or by `new.copy_(y)`, whichever has the copy's shape, strides and dtype."""
    copies = gm.graph.find_nodes(op="call_function", target=_copy)
    if not copies:
        return
    facts = AliasFacts(gm.graph)
    counted = frozenset(root for value in counted_storages(gm.graph, facts) for root in facts.roots(value))
    for node in copies:
        if not counted.isdisjoint(facts.roots(node)):
            continue  # the program does have that memory
        source = node.args[1]
        if not _replaced(node, [_call(node, _clone, source)]):
            new = _new_memory(node)
            _replaced(node, [new, _call(node, _fill, new, source)])


def _new_memory(node: fx.Node) -> fx.Node:
    """Memory for a copy alone. Only strides that are numbers can be asked for; others are those of a tensor like the target."""
    value = node.meta["val"]
    if not all(isinstance(number, int) for number in (*value.shape, *value.stride())):
        return _call(node, torch.ops.aten.empty_like.default, node.args[0])
    sizes = ([*value.shape], [*value.stride()])
    return _call(node, torch.ops.aten.empty_strided.default, *sizes, dtype=value.dtype, device=value.device)


def _call(node: fx.Node, operator: OpOverload, *args: Any, **kwargs: Any) -> fx.Node:
    """A call before a copy, with what is known of the copy."""
    with node.graph.inserting_before(node):
        call = node.graph.call_function(operator, args, kwargs)
    call.meta = {key: said for key, said in node.meta.items() if key not in {"val", "tensor_meta"}}
    call.meta["val"] = derive(call, fake_mode_of(node.graph))
    return call


def _replaced(node: fx.Node, calls: Sequence[fx.Node]) -> bool:
    """Put the last of these calls in the place of a copy if it is like it; otherwise erase them."""
    fits = difference(node.meta["val"], calls[-1].meta["val"]) is None
    if fits:
        node.replace_all_uses_with(calls[-1])
    for unused in [node] if fits else reversed(calls):
        node.graph.erase_node(unused)
    return fits
