"""Computes a value once that the program computes several times, such as the position of a token in each layer.

Every bit stays. A value stays its own where it is written, leaves the graph, is drawn at random, or where what it reads may have
been written since the first time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from npugraph_ex.fusion.checks import GraphFacts, Site, one_scope
from npugraph_ex.graph.effects import draws_random_numbers, has_effect
from npugraph_ex.graph.launches import Launched, launches
from npugraph_ex.graph.memory.aliases import output_values, tensor_leaves
from npugraph_ex.graph.metadata import difference
from npugraph_ex.graph.operators import is_view
from npugraph_ex.graph.repeated_parts import call_key
from npugraph_ex.graph.source import source_line
from npugraph_ex.report.builder import ReportBuilder
from npugraph_ex.report.passes import SAME_BITS, Fusion

NAME = "lift_repeated"
_aten = torch.ops.aten
_CHOOSING = frozenset({_aten.index.Tensor, _aten.index_select.default, _aten.embedding.default})


def join(facts: GraphFacts, report: ReportBuilder, *, chosen: bool = False) -> bool:
    """Let equal values come from the first operator that computes them; edits the graph of ``facts`` in place.

    Args:
        facts: of the graph.
        report: learns what is no longer computed.
        chosen: whether only what is chosen from a tensor, by numbers or as a view, is joined. Forms read that. What is computed
            stays apart until they have: of two norms that share their first half neither would save a kernel.

    Returns:
        Whether there were any; then the facts are those of the graph before.
    """
    report.add_rule(NAME)
    graph = facts.graph
    leaving = [value for value in output_values(graph) if isinstance(value, fx.Node)]
    names: dict[fx.Node, object] = {}  # equal for what is computed alike
    first: dict[object, fx.Node] = {}
    # Asked before views lose what they are views of.
    starting = {node for node in graph.nodes if launches(node) and (not chosen or node.target in _CHOOSING)}
    views, joined = {node for node in graph.nodes if chosen and is_view(node)}, False
    for node in list(graph.nodes):
        key = _key(node, names)
        earlier = first.setdefault(key, node)
        names[node] = earlier
        if earlier is node or not (node in starting or node in views):
            continue
        # An earlier operator whose values may be others by now is not asked again.
        if any(facts.aliases.share_storage(value, one) for value in leaving for one in (node, earlier)) or not _same(
            earlier, node, facts
        ):
            first[key] = names[node] = node
            continue
        if node in starting:
            report.add_fusion(same_bits(node, earlier))
        node.replace_all_uses_with(earlier)
        graph.erase_node(node)
        joined = True
    return joined


def same_bits(node: fx.Node, by: fx.Node) -> Fusion:
    """The record of a value that another one has already."""
    saves = Launched.of([node])
    return Fusion(NAME, (node.name,), (by.name,), source_line(node), ulps=SAME_BITS, saves=saves, bit_equal=True)


def _key(node: fx.Node, names: Mapping[fx.Node, object]) -> object:
    """Equal for two calls that compute alike; the node itself where there is no telling."""
    if node.op != "call_function" or has_effect(node) or not tensor_leaves(node) or draws_random_numbers(node):
        return node
    return call_key(node, names)


def _same(earlier: fx.Node, node: fx.Node, facts: GraphFacts) -> bool:
    """Whether the two hold the same elements whenever they are read."""
    if facts.aliases.is_written(earlier) or facts.aliases.is_written(node) or _differ(earlier, node):
        return False
    if one_scope(Site((earlier, node), (node,), {}), facts) is not None:
        return False
    read = [*earlier.all_input_nodes, *node.all_input_nodes]
    return all(facts.aliases.touches(writer, read) is None for writer in facts.aliases.writers_between(earlier, node))


def _differ(earlier: fx.Node, node: fx.Node) -> Any:
    return difference(earlier.meta["val"], node.meta["val"])
