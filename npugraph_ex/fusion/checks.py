"""When a structural match may be replaced: each check answers None, or the reason why not.

The checks know graphs, not operators. What is particular to a rule is in the rule's condition.
"""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._inductor.pattern_matcher import CallFunction, Match
from torch._ops import OpOverload
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils import _pytree as pytree

from npugraph_ex.fusion import tracing
from npugraph_ex.fusion.arguments import argument_names, effective_arguments
from npugraph_ex.fusion.pattern import SchemaCall
from npugraph_ex.fusion.rule import PreparedRule
from npugraph_ex.graph.effects import has_effect, orders_work
from npugraph_ex.graph.memory.aliases import AliasFacts, is_view, tensor_leaves
from npugraph_ex.graph.metadata import difference

SCOPE_KEYS = ("stream_label", "core_limit", "deterministic_level")
"""The ``node.meta`` keys that say where and how a node runs; a fused node can have only one of each."""


@dataclass
class GraphFacts:
    """What the checks ask about the graph that is being rewritten."""

    graph: fx.Graph
    aliases: AliasFacts
    ordering: list[fx.Node] = field(default_factory=list)

    @classmethod
    def from_graph(cls, graph: fx.Graph) -> GraphFacts:
        """The facts of ``graph`` as it is now."""
        return cls(graph, AliasFacts(graph), [node for node in graph.nodes if orders_work(node)])

    def ordering_between(self, matched: Sequence[fx.Node]) -> fx.Node | None:
        """A scope, event, record or collective between the first and the last of ``matched`` and not one of them."""
        for node in self.ordering[bisect_left(self.ordering, matched[0]) :]:
            if node >= matched[-1]:
                return None
            if node not in matched:
                return node
        return None


@dataclass(frozen=True)
class Site:
    """One place where a rule matches.

    A matched view of an input costs nothing, whoever uses it, and is right as it is: it stays. The replacement's result
    for it, which may be a copy with other strides, is not used. A match whose outputs are all such views is replaced as
    a whole, because nothing else is left to be replaced.

    Attributes:
        nodes: the matched nodes that the replacement makes superfluous, in graph order.
        outputs: what the pattern returns, in its order.
        bound: what each wildcard is bound to.
        kept: the matched nodes that stay, in graph order.
    """

    nodes: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    bound: dict[str, Any]
    kept: tuple[fx.Node, ...] = ()

    @classmethod
    def from_match(cls, match: Match) -> Site:
        """The place that ``match`` describes."""
        outputs = tuple(node for node in match.output_nodes() if node is not None)
        matched = sorted(set(match.nodes))
        views = _views_of_inputs(matched)
        if views.issuperset(outputs):
            views = set()
        nodes = tuple(node for node in matched if node not in views)
        return cls(nodes, outputs, dict(match.kwargs), tuple(sorted(views)))

    @property
    def replaced(self) -> tuple[fx.Node, ...]:
        """The outputs whose place the replacement's results take."""
        return tuple(output for output in self.outputs if output not in self.kept)

    def replaced_by(self, results: Sequence[object]) -> list[tuple[fx.Node, object]]:
        """The replaced outputs that anyone uses, each with that of ``results``, one for each output, that comes there."""
        pairs = zip(self.outputs, results, strict=True)
        return [(output, result) for output, result in pairs if output.users and output not in self.kept]

    @property
    def inputs(self) -> list[fx.Node]:
        """The nodes that the wildcards are bound to."""
        return [leaf for leaf in pytree.tree_leaves(list(self.bound.values())) if isinstance(leaf, fx.Node)]

    @property
    def name(self) -> str:
        """The last operator of the match, which stands for it in reports."""
        return next(node for node in reversed(self.nodes) if node.target is not operator.getitem).name


def _views_of_inputs(matched: Sequence[fx.Node]) -> set[fx.Node]:
    """Those of ``matched``, which are in graph order, that only name memory of what the match is given."""
    inside, views = set(matched), set[fx.Node]()
    for node in matched:
        if is_view(node) and all(source in views or source not in inside for source in node.all_input_nodes):
            views.add(node)
    return views


def describe(node: fx.Node) -> str:
    """``node`` as a person would call it: ``output 1 of npu_add_rms_norm`` rather than ``getitem_1``."""
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        return f"output {node.args[1]} of {node.args[0].name}"
    return node.name


def wildcards(rule: PreparedRule, site: Site) -> str | None:
    """Tensor wildcards are bound to tensors, number wildcards to numbers."""
    for name in rule.flat_names:
        if name not in site.bound:
            return f"nothing in the match is called {name}"
        value = site.bound[name]
        is_tensor = isinstance(value, fx.Node) and len(tensor_leaves(value)) == 1
        if name in rule.tensors and not is_tensor:
            return f"{name} is {value}, the pattern has a tensor"
        if name not in rule.tensors and isinstance(value, fx.Node):
            return f"{name} is the node {value}, the pattern has a number"
    return None


def sizes(match: Match, symbols: Mapping[str, torch.SymInt]) -> str | None:
    """Where the pattern computes with a symbolic size of its inputs, the graph has that size and no other number."""
    for name, symbol in symbols.items():
        bound = match.kwargs.get(name, symbol)
        value = bound.meta.get("val") if isinstance(bound, fx.Node) else bound
        if not isinstance(value, (int, torch.SymInt)) or not statically_known_true(value == symbol):
            return f"the match has {bound} where the pattern has the size {symbol}"
    return None


def unnamed_arguments(match: Match) -> str | None:
    """In a pattern written by hand, an argument that it does not name has the schema's default on the node."""
    for part, node in match.ctx.pattern_to_node.items():
        if not isinstance(part, CallFunction) or isinstance(part, SchemaCall) or not isinstance(node, fx.Node):
            continue
        if not isinstance(node.target, OpOverload):
            continue
        defaults = fx.Graph().create_node("call_function", node.target)
        names, standard = argument_names(node.target), effective_arguments(defaults)
        for position, value in enumerate(effective_arguments(node)):
            named = position < len(part.args) or names[position] in part.kwargs
            if not named and (isinstance(value, fx.Node) or value != standard[position]):
                return f"{node}: {names[position]} is {value}, which the pattern does not name"
    return None


def vanishing_values(site: Site) -> str | None:
    """No value that the replacement does not produce is used outside the match."""
    matched = set(site.nodes)
    for node in site.nodes:
        if node in site.replaced:
            continue
        for user in node.users:
            if user in matched:
                continue
            if user.target is operator.getitem and user.op == "call_function":
                if user.users:
                    return _also_used(describe(user), next(iter(user.users)))
            else:
                return _also_used(describe(node), user)
    return None


def _also_used(what: str, user: fx.Node) -> str:
    return f"{what} is also {'a result of the graph' if user.op == 'output' else f'used by {user.name}'}"


def _scope(node: fx.Node) -> tuple[object, ...]:
    custom = node.meta.get("custom") or {}
    return (*(node.meta.get(key) for key in SCOPE_KEYS), custom.get("stream"))


def one_scope(site: Site, facts: GraphFacts) -> str | None:
    """All matched operators run on one stream, under one core limit and one deterministic level."""
    operators = [node for node in site.nodes if node.target is not operator.getitem]
    for node in operators[1:]:
        if _scope(node) != _scope(operators[0]):
            keys = (*SCOPE_KEYS, "stream")
            parts = zip(keys, _scope(operators[0]), _scope(node), strict=True)
            key, first, other = next(part for part in parts if part[1] != part[2])
            return f"{operators[0].name} has {key} {first!r} and {node.name} has {other!r}"
    between = facts.ordering_between(site.nodes)
    return f"{between.name} ({between.target}) lies between the matched operators" if between else None


def undisturbed(site: Site, placements: Sequence[Placement], facts: GraphFacts) -> str | None:
    """Nothing writes what the matched or moved operators read or produce, between their old place and the new one.

    A matched operator may write memory that the match itself made, as one does that computes in the place of its argument:
    nobody sees that memory but through the outputs.
    """
    places = [placement.before for placement in placements]
    first, last = min(site.nodes[0], *places), max(site.nodes[-1], *places)
    late = [node for placement in placements for node in placement.late]
    moved = [source for node in late for source in (node, *node.all_input_nodes)]
    concerned = [*site.inputs, *site.nodes, *moved]
    matched = set(site.nodes)
    others = [writer for writer in facts.aliases.writers_between(first, last) if writer not in matched]
    for writer in (*site.nodes, *others):
        touched = facts.aliases.touches(writer, site.inputs if writer in matched else concerned)
        if touched is not None:
            return f"{writer.name} writes {describe(touched)} between the matched operators"
    return None


def same_metadata(site: Site, results: Sequence[object]) -> str | None:
    """Every replaced output that anyone uses keeps shape, dtype, strides and device."""
    for output, result in site.replaced_by(results):
        new = result.meta.get("val") if isinstance(result, fx.Node) else result
        changed = difference(output.meta["val"], new)
        if changed:
            return f"{describe(output)} would have {changed}"
    return None


def same_aliasing(site: Site, replacement: fx.Graph, values: Sequence[Any], facts: GraphFacts) -> str | None:
    """Every replaced output shares memory with the same inputs, and the same other outputs, as before.

    Args:
        site: the match.
        replacement: what comes in its place.
        values: what each of its placeholders stands for.
        facts: of the graph.
    """
    inside = AliasFacts(replacement)
    pairs = zip(replacement.find_nodes(op="placeholder"), values, strict=True)
    actual = {placeholder: value for placeholder, value in pairs if isinstance(value, fx.Node)}
    replaced = site.replaced_by(output_nodes(replacement))
    input_roots = frozenset().union(*(facts.aliases.roots(node) for node in site.inputs))
    for position, (output, result) in enumerate(replaced):
        if not isinstance(result, fx.Node):
            continue
        shared = (facts.aliases.roots(source) for twin, source in actual.items() if inside.share_storage(twin, result))
        if frozenset().union(*shared) != facts.aliases.roots(output) & input_roots:
            return f"{describe(output)} would share memory with other inputs than before"
        for earlier, other in replaced[:position]:
            now = isinstance(other, fx.Node) and inside.share_storage(other, result)
            if now != facts.aliases.share_storage(earlier, output):
                return f"{describe(output)} and {describe(earlier)} would share memory differently"
    return None


def output_nodes(replacement: fx.Graph) -> list[object]:
    """What the replacement returns, flat."""
    return tracing.output_leaves(replacement)


@dataclass(frozen=True)
class Placement:
    """Where the replacement goes.

    Attributes:
        before: the node in front of which it is inserted.
        late: nodes in front of ``before`` that use a replaced output and so must move behind the replacement, in order.
    """

    before: fx.Node
    late: tuple[fx.Node, ...] = ()


def find_placement(site: Site) -> Placement | str:
    """A place after every input and before every user of an output; a reason when there is none.

    When an input is defined only after a user of an output, that user, with what follows from it, moves behind the
    replacement, provided that nothing in between has an effect and the input does not follow from the output itself.
    """
    matched, last = set(site.nodes), site.nodes[-1]
    users = [user for output in site.replaced for user in output.users if user not in matched]
    first_user = min(users, default=last)
    if first_user >= last:
        return Placement(last)
    if all(node < first_user for node in site.inputs):
        return Placement(first_user)
    late = _following(site, first_user, last)
    for node in site.inputs:
        if node in late:
            return f"{node.name} depends on a replaced output through {first_user.name}: fusing would close a cycle"
    # Internal matched nodes need no check: they depend on inputs and on each other only.
    effect = next((node for node in late if has_effect(node)), None)
    if effect is not None:
        return f"{effect.name} uses a replaced output, has an effect, and comes before an input is defined"
    return Placement(last, tuple(late))


def _following(site: Site, first: fx.Node, last: fx.Node) -> dict[fx.Node, None]:
    """The nodes from ``first`` to before ``last`` that follow from a replaced output, matched ones aside."""
    matched, outputs = set(site.nodes), set(site.replaced)
    late: dict[fx.Node, None] = {}
    node = first
    while node is not last:
        sources: Iterable[fx.Node] = node.all_input_nodes
        if node not in matched and any(source in outputs or source in late for source in sources):
            late[node] = None
        node = node.next
    return late
