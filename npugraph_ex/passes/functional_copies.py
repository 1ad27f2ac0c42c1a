"""Makes functional copies that were not reinplaced plain copies of their source.

Functionalization writes `x.copy_(y)` as `copy(x, y)`, of which the operator first copies the memory of `x`, up to its last
element and with whatever lies before it. Only `as_strided` would show that memory to the program, and nobody guards where in
its storage `x` begins.
"""

from __future__ import annotations

import torch
from torch import fx

from npugraph_ex.graph.memory.aliases import AliasFacts, counted_storages
from npugraph_ex.graph.metadata import derive, difference, fake_mode_of
from npugraph_ex.passes.base import PassContext

_copy, _clone = torch.ops.aten.copy.default, torch.ops.aten.clone.default


def run(gm: fx.GraphModule, context: PassContext) -> None:  # noqa: ARG001 - every pass takes it
    """Replace `copy(x, y)` by `clone(y)` where the clone has the copy's shape, strides and dtype."""
    copies = gm.graph.find_nodes(op="call_function", target=_copy)
    if not copies:
        return
    facts = AliasFacts(gm.graph)
    counted = frozenset(root for value in counted_storages(gm.graph, facts) for root in facts.roots(value))
    for node in copies:
        source = node.args[1]
        if not counted.isdisjoint(facts.roots(node)):
            continue  # the program does have that memory
        with gm.graph.inserting_before(node):
            clone = gm.graph.call_function(_clone, (source,))
        clone.meta = {key: said for key, said in node.meta.items() if key not in {"val", "tensor_meta"}}
        clone.meta["val"] = derive(clone, fake_mode_of(gm.graph))
        if difference(node.meta["val"], clone.meta["val"]) is None:
            node.replace_all_uses_with(clone)
            gm.graph.erase_node(node)
        else:
            gm.graph.erase_node(clone)
