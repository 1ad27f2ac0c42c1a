"""Finds programs that write an argument and then give it other memory (`x.add_(1); x.data = y`); AOT loses that write.

AOT copies an argument's new value into it at the end of a call. By then it has its other memory, and who shares the earlier
memory sees nothing. Such a program runs operator by operator.
"""

from __future__ import annotations

from torch import fx

from npugraph_ex import _torch_private
from npugraph_ex.frontend.upstream_repairs.layouts import may_write, name_of_call
from npugraph_ex.versions.repair import NOT_REPORTED, Repair

REPAIR = Repair(
    fault="What is written into an argument before `argument.data = other` is lost to tensors that share its memory.",
    threads=NOT_REPORTED,
    test="tests/frontend/test_replaced_memory.py",
)


def lost_write(gm: fx.GraphModule) -> str:
    """Why AOT would lose a write of a Dynamo graph; empty if it would not."""
    if not any(map(_replaces, gm.graph.nodes)):
        return ""
    origins: dict[fx.Node, set[fx.Node]] = {}  # the arguments of which a value may be a part
    written: set[fx.Node] = set()
    for node in gm.graph.nodes:
        inputs = node.all_input_nodes
        origins[node] = {node} if node.op == "placeholder" else set().union(*(origins[one] for one in inputs))
        if _replaces(node):
            lost = written & origins[inputs[0]]
            if lost:
                names = zip(gm.graph.find_nodes(op="placeholder"), _torch_private.dynamo_input_names(gm), strict=True)
                return f"it writes {next(name for one, name in names if one in lost)} and then gives it other memory"
        elif may_write(node):
            written |= origins[node]
    return ""


def _replaces(node: fx.Node) -> bool:
    name = name_of_call(node)
    return name.partition(".")[0] in _REPLACING and bool(node.all_input_nodes)


_REPLACING = frozenset({"set_", "shallow_copy_data_"})
"""What Dynamo writes for `x.data = y`, until torch 2.13 and from 2.14 on."""
