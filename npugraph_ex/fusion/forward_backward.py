"""Splits a match in a joint graph into a forward and a backward part, and finds a place for each.

The rest of the model lies between the two; the backward part waits for its gradients. In an inference graph, and for a
rule without gradients, a match is one part.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from npugraph_ex import _torch_private
from npugraph_ex.fusion import checks
from npugraph_ex.fusion.checks import GraphFacts, Placement, Site
from npugraph_ex.graph.memory.aliases import AliasFacts, mutated_inputs


@dataclass(frozen=True)
class MatchPart:
    """The forward or the backward part of a match, and the position of its replacement."""

    site: Site
    placement: Placement


def backward_nodes(nodes: Iterable[fx.Node], gradients: Collection[fx.Node]) -> set[fx.Node]:
    """The members of ``nodes`` (in graph order) that take one of ``gradients`` or were traced in the backward."""
    found: set[fx.Node] = set()
    for node in nodes if gradients else ():
        takes_one = any(source in found or source in gradients for source in node.all_input_nodes)
        if takes_one or _torch_private.is_of_backward(node):
            found.add(node)
    return found


def backward_of(parts: Sequence[MatchPart], replacement: fx.Graph) -> set[fx.Node]:
    """The nodes of ``replacement`` for the backward part of a match."""
    gradients = parts[-1].site.bound.keys() - parts[0].site.bound.keys()
    placeholders = replacement.find_nodes(op="placeholder")
    return backward_nodes(replacement.nodes, [node for node in placeholders if node.name in gradients])


def backward_reads_overwritten_input(
    parts: Sequence[MatchPart], replacement: fx.Graph, values: Sequence[Any], facts: GraphFacts
) -> str | None:
    """Check that the backward reads no input that is written after the forward, unless the original did so too.

    Args:
        parts: the match's parts.
        replacement: the traced replacement.
        values: the values of its placeholders.
        facts: the graph's facts.
    """
    if len(parts) == 1:
        return None
    # AOT puts the copies at the end of the forward behind the backward, so graph order does not show when they run.
    placeholders = facts.graph.find_nodes(op="placeholder")
    written = [placeholders[position] for position in mutated_inputs(facts.graph, facts.aliases)]
    written += _torch_private.inputs_written_afterwards(facts.graph)
    backward, inside = backward_of(parts, replacement), AliasFacts(replacement)
    kept = _read_from_outside(backward)
    read_before = _read_from_outside(parts[-1].site.nodes)
    for placeholder, value in zip(replacement.find_nodes(op="placeholder"), values, strict=True):
        if not isinstance(value, fx.Node) or not any(inside.share_storage(placeholder, node) for node in kept):
            continue
        overwritten = any(facts.aliases.share_storage(value, node) for node in written)
        if overwritten and not any(facts.aliases.share_storage(value, node) for node in read_before):
            return f"the backward would read {value.name}, which is written after the forward"
    return None


def _read_from_outside(nodes: Collection[fx.Node]) -> set[fx.Node]:
    return {source for node in nodes for source in node.all_input_nodes if source not in nodes}


def place_parts(site: Site, wildcards: Collection[str]) -> list[MatchPart] | str:
    """The parts of ``site`` with their positions, the forward part first, or a reason if one has no position.

    Args:
        site: the match.
        wildcards: the search function's arguments; any other node that the match bound is a gradient.
    """
    gradients = {name: value for name, value in site.bound.items() if name not in wildcards}
    late = backward_nodes(site.nodes, [value for value in gradients.values() if isinstance(value, fx.Node)])
    if len(late) == len(site.nodes):
        return "all of its operators are of the backward, its forward ones too"
    parts: list[MatchPart] = []
    for part in _parts(site, late, gradients) if late else [site]:
        placement = checks.find_placement(part)
        if isinstance(placement, str):
            return placement
        parts.append(MatchPart(part, placement))
    if len(parts) > 1 and not parts[0].placement.before < parts[1].placement.before:
        return "its forward operators come after its backward ones"
    return parts


def _parts(site: Site, late: Collection[fx.Node], gradients: Collection[str]) -> Sequence[Site]:
    early = {name: value for name, value in site.bound.items() if name not in gradients}
    return [
        Site(
            tuple(node for node in site.nodes if (node in late) == backward),
            tuple(node for node in site.outputs if (node in late) == backward),
            site.bound if backward else early,
            site.kept,
        )
        for backward in (False, True)
    ]
