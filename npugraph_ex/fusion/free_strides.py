"""Decides whether a result may have other strides than before because no program can see them.

A rule with ``free_strides`` returns the same elements in another memory order: a fused matrix product writes the transposed
result densely, where the original made a transposed view. Code that reads strides would notice. So the new strides are
followed through all users. The match is refused if they reach a result of the graph, a write, or an operator whose result
depends on the layout. The search ends at operators whose results have the same strides as before.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from npugraph_ex import _torch_private
from npugraph_ex.fusion.checks import Site, describe
from npugraph_ex.graph.effects import has_effect
from npugraph_ex.graph.memory.aliases import schema_of, written_by
from npugraph_ex.graph.metadata import difference, fake_mode_of, same_numbers, shares_memory

_NAMESPACES = ("aten", "prims", "npu")
_READS_LAYOUT = (
    "as_strided", "as_strided_copy", "as_strided_scatter", "contiguous", "reshape", "_reshape_alias", "resize", "resize_as",
    "set", "to_dlpack", "new_empty_strided",
)  # fmt: skip
"""Operators whose elements, or whose sharing of memory, depend on the strides of their arguments."""


def new_values(site: Site, results: Sequence[object], graph: fx.Graph) -> dict[fx.Node, Any] | str:
    """The metadata of every node that depends on the new strides of the outputs of ``site``, or a reason against them.

    Args:
        site: the match.
        results: the node of the traced replacement for each output.
        graph: the graph of ``site``.
    """
    start: dict[fx.Node, Any] = {}
    for output, result in site.replaced_by(results):
        old = output.meta["val"]
        new = result.meta.get("val") if isinstance(result, fx.Node) else result
        if difference(old, new) is None:
            continue
        if not _only_strides_differ(old, new):
            return f"{describe(output)} would have {difference(old, new)}"
        start[output] = new
    return _StridePropagation(site, graph, start).follow() if start else {}


def apply_new_values(values: Mapping[fx.Node, Any], new: Sequence[fx.Node]) -> None:
    """Store the new metadata, and drop copies that only made a result dense which now is dense.

    A copy is dropped only if it is the only user of a new result, so that no program can see the difference.
    """
    for node, value in values.items():
        node.meta["val"] = value
    for node in new if values else ():
        copy = next(iter(node.users)) if len(node.users) == 1 else None
        if copy is None or copy.target is not torch.ops.aten.clone.default or not _is_fresh(node):
            continue
        if difference(node.meta["val"], copy.meta["val"]) is None:
            copy.replace_all_uses_with(node)
            copy.graph.erase_node(copy)


def _is_fresh(node: fx.Node) -> bool:
    return schema_of(node) is not None and not shares_memory(node)


def _only_strides_differ(old: object, new: object) -> bool:
    """Whether two values have equal shape, dtype, device and layout, tensor by tensor."""
    if isinstance(old, (tuple, list)) and isinstance(new, (tuple, list)) and len(old) == len(new):
        return all(_only_strides_differ(a, b) for a, b in zip(old, new, strict=True))
    if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor):
        return difference(old, new) is None
    same = old.dtype == new.dtype and old.device == new.device and old.layout == new.layout
    return same and same_numbers(old.shape, new.shape)


class _StridePropagation:
    """The nodes that depend on new strides, in graph order."""

    def __init__(self, site: Site, graph: fx.Graph, start: Mapping[fx.Node, Any]) -> None:
        self._matched = frozenset(site.nodes)
        self._mode = fake_mode_of(graph)
        self._values = dict(start)
        self._due: list[fx.Node] = []
        self._seen: set[fx.Node] = set()
        for node in start:
            self._push_users(node)

    def follow(self) -> dict[fx.Node, Any] | str:
        """Every affected node with its new value, or a reason against the strides."""
        while self._due:
            node = heapq.heappop(self._due)
            reason = self._reach(node)
            if reason is not None:
                return reason
        return self._values

    def _push_users(self, node: fx.Node) -> None:
        for user in node.users:
            if user not in self._seen and user not in self._matched:
                self._seen.add(user)
                heapq.heappush(self._due, user)

    def _reach(self, node: fx.Node) -> str | None:
        source = next(value for value in node.all_input_nodes if value in self._values)
        changed = difference(source.meta["val"], self._values[source])
        if node.op == "output":
            return f"{describe(source)} would have {changed}, and it is a result of the graph"
        if not _is_indifferent(node) or any(value in self._values for value in written_by(node)):
            return f"{describe(source)} would have {changed}, and {node.name} ({node.target}) may depend on them"
        if has_effect(node):
            return None  # it writes something else, from the same elements
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda value: self._values.get(value, value.meta["val"]))
        try:
            with _torch_private.fake_execution(self._mode):
                new = node.target(*args, **kwargs)  # type: ignore[operator]
        except Exception as error:  # noqa: BLE001 - whatever the operator raises, it does not take these strides
            return f"{describe(source)} would have {changed}, which {node.name} does not accept: {error}"
        if difference(node.meta["val"], new) is None:
            return None
        if not _only_strides_differ(node.meta["val"], new):
            return f"{describe(source)} would have {changed}, and {node.name} then {difference(node.meta['val'], new)}"
        self._values[node] = new
        self._push_users(node)
        return None


def _is_indifferent(node: fx.Node) -> bool:
    """Whether the operator's elements depend only on its arguments' elements and not on their strides."""
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, OpOverload) or node.target.namespace not in _NAMESPACES:
        return False
    if torch.Tag.nondeterministic_seeded in node.target.tags or node.target is torch.ops.aten.view.dtype:
        return False  # random numbers are drawn in memory order
    return node.target.overloadpacket.__name__.removesuffix("_") not in _READS_LAYOUT
