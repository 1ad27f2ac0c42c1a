"""A cheap record of a graph. It finds later changes and can restore the graph.

Node arguments are immutable tuples that are replaced, never edited, so the tuple is enough to notice a change by identity and
to restore it. A record takes linear time, with a small constant, and copies no tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import fx

from npugraph_ex import _torch_private
from npugraph_ex.graph.metadata import only_renamed


class _NodeRecord(NamedTuple):
    node: fx.Node
    op: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    meta: dict[str, Any]
    name: str

    def still_true(self) -> bool:
        """Whether the node has not changed since the record."""
        node = self.node
        return node.args is self.args and node.kwargs is self.kwargs and node.target is self.target


class Snapshot:
    """The state of ``gm.graph`` at one moment."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self._graph = gm.graph
        self._codegen = _torch_private.codegen_of(gm.graph)
        self._records = {
            node: _NodeRecord(node, node.op, node.target, node.args, node.kwargs, dict(node.meta), node.name)
            for node in gm.graph.nodes
        }

    def __len__(self) -> int:
        return len(self._records)

    def changed_nodes(self, gm: fx.GraphModule) -> Iterator[fx.Node]:
        """The nodes of ``gm`` that are new, or have another target or other arguments, in graph order."""
        for node in gm.graph.nodes:
            record = self._records.get(node)
            if record is None or record.target is not node.target:
                yield node
            elif record.still_true() or only_renamed(node, record.args, record.kwargs):
                continue
            else:
                yield node

    def differs(self, gm: fx.GraphModule) -> bool:
        """Whether nodes were added, removed, reordered or changed."""
        if gm.graph is not self._graph or len(gm.graph.nodes) != len(self._records):
            return True
        return any(
            node is not record.node or not record.still_true()
            for node, record in zip(gm.graph.nodes, self._records.values(), strict=True)
        )

    def restore(self, gm: fx.GraphModule) -> None:
        """Restore the recorded graph in ``gm``, as new nodes with the same names and metadata."""
        graph = fx.Graph(owning_module=gm)
        twins: dict[fx.Node, fx.Node] = {}
        for record in self._records.values():
            args = fx.map_arg(record.args, lambda node: twins[node])
            kwargs = fx.map_arg(record.kwargs, lambda node: twins[node])
            twin = graph.create_node(
                record.op, record.target, args, kwargs, name=record.name, type_expr=record.node.type
            )
            twin.meta = dict(record.meta)
            twins[record.node] = twin
        graph.set_codegen(self._codegen)
        gm.graph = graph
