"""Puts a traced replacement into a graph in place of a match. The checks have already allowed it."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch import fx

from npugraph_ex import _torch_private
from npugraph_ex.fusion.checks import SCOPE_KEYS, GraphFacts, Site, output_nodes
from npugraph_ex.fusion.forward_backward import MatchPart, backward_of
from npugraph_ex.graph import metadata
from npugraph_ex.graph.operators import is_view


def splice(
    site: Site, parts: Sequence[MatchPart], replacement: fx.Graph, values: Sequence[Any], facts: GraphFacts
) -> list[fx.Node]:
    """Insert ``replacement`` with its inputs set to ``values``, redirect all users, erase the matched nodes.

    Args:
        site: the match.
        parts: its parts with their positions; nodes that take a gradient go to the last position.
        replacement: traced on inputs like ``values``.
        values: the values of its placeholders.
        facts: the graph's facts.

    Returns:
        The new nodes that call something.
    """
    graph = facts.graph
    twins: dict[fx.Node, Any] = dict(zip(replacement.find_nodes(op="placeholder"), values, strict=True))
    backward = backward_of(parts, replacement)
    inherited = [_inherited(part.site) for part in parts]
    new: list[fx.Node] = []
    mode = metadata.fake_mode_of(graph)
    for node in replacement.nodes:
        if node.op != "call_function":
            continue
        part = -1 if node in backward else 0
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda inner: twins[inner])
        with graph.inserting_before(parts[part].placement.before):
            twin = graph.call_function(node.target, args, kwargs)
        twin.meta = {"val": node.meta.get("val"), **inherited[part]}
        if metadata.shares_memory(node) and not is_view(twin):  # it was traced as a view of something else
            twin.meta["val"] = metadata.derive(twin, mode)
        facts.aliases.add(twin)
        twins[node] = twin
        new.append(twin)
    for placement in (part.placement for part in parts):
        for node in placement.late:
            placement.before.prepend(node)
    for output, result in site.replaced_by(output_nodes(replacement)):
        output.replace_all_uses_with(twins[result] if isinstance(result, fx.Node) else result)  # type: ignore[arg-type]
    _erase(site, graph)
    return _without_dead(new, graph)


def _inherited(site: Site) -> dict[str, Any]:
    """Source and scope metadata, each from the last matched operator that has it."""
    inherited: dict[str, Any] = {}
    for node in site.nodes:
        if node.target is not operator.getitem:
            keys = (*SCOPE_KEYS, *_torch_private.provenance_fields())
            inherited.update({key: node.meta[key] for key in keys if key in node.meta})
    return inherited


def _erase(site: Site, graph: fx.Graph) -> None:
    """Erase the unnecessary nodes, the kept ones without users, and unused outputs of both."""
    for node in (*reversed(site.nodes), *reversed(site.kept)):
        for user in list(node.users):
            if user.target is operator.getitem and not user.users:
                graph.erase_node(user)
        if not (node in site.kept and node.users):
            graph.erase_node(node)


def _without_dead(new: list[fx.Node], graph: fx.Graph) -> list[fx.Node]:
    """Erase new nodes without users, such as outputs that the match does not need."""
    kept = []
    for node in reversed(new):
        if node.users:
            kept.append(node)
        else:
            graph.erase_node(node)
    return kept[::-1]
