"""The checks of a structural match: each returns None if the match may be replaced, or the reason against it.

The checks know graphs, not operators. A rule's own conditions are in the rule.
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
from npugraph_ex.graph.effects import draws_random_numbers, has_effect, orders_work
from npugraph_ex.graph.memory.aliases import AliasFacts, is_view, tensor_leaves
from npugraph_ex.graph.metadata import difference, same_numbers

SCOPE_KEYS = ("stream_label", "core_limit", "deterministic_level")
"""The ``node.meta`` keys for stream, limits and level of a node; a fused node has one value of each."""


@dataclass
class GraphFacts:
    """The facts about the graph that the checks use."""

    graph: fx.Graph
    aliases: AliasFacts
    ordering: list[fx.Node] = field(default_factory=list)

    @classmethod
    def from_graph(cls, graph: fx.Graph) -> GraphFacts:
        """The facts of ``graph`` in its present state."""
        return cls(graph, AliasFacts(graph), [node for node in graph.nodes if orders_work(node)])

    def ordering_between(self, matched: Sequence[fx.Node]) -> fx.Node | None:
        """A scope, event or collective between the first and the last of ``matched`` that is not one of them."""
        for node in self.ordering[bisect_left(self.ordering, matched[0]) :]:
            if node >= matched[-1]:
                return None
            if node not in matched:
                return node
        return None


@dataclass(frozen=True)
class Site:
    """One match of a rule.

    A matched view of an input costs nothing and stays, whatever uses it. The replacement's result for it, which may be a copy
    with other strides, is not used. If all outputs of a match are such views, the whole match is replaced, because nothing
    else remains.

    Attributes:
        nodes: the matched nodes that the replacement makes unnecessary, in graph order.
        outputs: the pattern's results, in order.
        bound: the value of each wildcard.
        kept: the matched nodes that stay, in graph order.
    """

    nodes: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    bound: dict[str, Any]
    kept: tuple[fx.Node, ...] = ()

    @classmethod
    def from_match(cls, match: Match, bound: Mapping[str, Any] | None = None) -> Site:
        """The site of ``match``; of wildcards that it does not bind, such as numbers, ``bound`` has the values."""
        outputs = tuple(node for node in match.output_nodes() if node is not None)
        matched = sorted(set(match.nodes))
        views = _views_of_inputs(matched)
        if views.issuperset(outputs):
            views = set()
        nodes = tuple(node for node in matched if node not in views)
        known = (
            match.kwargs if bound is None else {name: match.kwargs.get(name, value) for name, value in bound.items()}
        )
        return cls(nodes, outputs, dict(known), tuple(sorted(views)))

    @property
    def replaced(self) -> tuple[fx.Node, ...]:
        """The outputs that the replacement's results replace."""
        return tuple(output for output in self.outputs if output not in self.kept)

    def replaced_by(self, results: Sequence[object]) -> list[tuple[fx.Node, object]]:
        """The replaced outputs with users, each with its member of ``results``, which has one member for each output."""
        pairs = zip(self.outputs, results, strict=True)
        return [(output, result) for output, result in pairs if output.users and output not in self.kept]

    @property
    def inputs(self) -> list[fx.Node]:
        """The nodes that the wildcards are bound to."""
        return [leaf for leaf in pytree.tree_leaves(list(self.bound.values())) if isinstance(leaf, fx.Node)]

    @property
    def name(self) -> str:
        """The last operator of the match, which names it in reports."""
        return next(node for node in reversed(self.nodes) if node.target is not operator.getitem).name


def _views_of_inputs(matched: Sequence[fx.Node]) -> set[fx.Node]:
    """The nodes of ``matched`` (in graph order) that are only views of the match's inputs."""
    inside, views = set(matched), set[fx.Node]()
    for node in matched:
        if is_view(node) and all(source in views or source not in inside for source in node.all_input_nodes):
            views.add(node)
    return views


def describe(node: fx.Node) -> str:
    """A readable name of ``node``: ``output 1 of npu_add_rms_norm`` rather than ``getitem_1``."""
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        return f"output {node.args[1]} of {node.args[0].name}"
    return node.name


def wildcards(rule: PreparedRule, site: Site) -> str | None:
    """Check that tensor wildcards are bound to tensors, and number wildcards to numbers."""
    for name in rule.flat_names:
        if name not in site.bound:
            return f"nothing in the match is called {name}"
        value = site.bound[name]
        is_tensor = isinstance(value, fx.Node) and len(tensor_leaves(value)) == 1
        if name in rule.tensors and not is_tensor:
            return f"{name} is {value}, the pattern has a tensor"
        if name not in rule.tensors and isinstance(value, fx.Node):
            return f"{name} is {_in_place_of_a_number(value)}"
    return _other_kind_of_number(rule, site)


def _in_place_of_a_number(node: fx.Node) -> str:
    """What the node is, that the pattern has a number there, and what makes it one: of a tensor only its author can."""
    for tensor in tensor_leaves(node):
        shown = f"the tensor {node} ({str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}), the pattern has a number"
        return shown if tensor.dim() else f"{shown} (a Python number in the tensor's place would match)"
    return f"the node {node}, the pattern has a number (with dynamic=False numbers that change stay numbers)"


def _other_kind_of_number(rule: PreparedRule, site: Site) -> str | None:
    """Check that each number is of the kind that the rule was registered with, where the kind decides what is computed.

    No operator takes a truth value for every number. `y * 2` of an int8 `y` wraps around, and `y * 2.0` does not; of a
    floating-point `y` both are the same.
    """
    for name, example in rule.rule.scalars.items():
        value = site.bound.get(name, example)
        what = f"{name} is {value}; the rule was registered with {example}"
        if isinstance(value, bool) != isinstance(example, bool):
            return f"{what}, and only one of them is a truth value"
        if isinstance(value, int) != isinstance(example, int):
            whole = next((node for node in site.nodes if _reads_integers_and(value, node)), None)
            if whole is not None:
                return f"{what}, and only one of them is a whole number, as {whole.name} reads"
    return None


def _reads_integers_and(number: object, node: fx.Node) -> bool:
    """Whether an operator takes this number and no tensor that could have fractions."""
    leaves = pytree.tree_leaves([node.args, node.kwargs])
    tensors = [tensor for leaf in leaves if isinstance(leaf, fx.Node) for tensor in tensor_leaves(leaf)]
    given = any(type(leaf) is type(number) and leaf == number for leaf in leaves)
    return given and not any(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors)


def sizes(match: Match, symbols: Mapping[str, torch.SymInt]) -> str | None:
    """Check that the graph has the same size wherever the pattern uses a symbolic size of its inputs."""
    for name, symbol in symbols.items():
        bound = match.kwargs.get(name, symbol)
        value = bound.meta.get("val") if isinstance(bound, fx.Node) else bound
        if not isinstance(value, (int, torch.SymInt)) or not statically_known_true(value == symbol):
            return f"the match has {bound} where the pattern has the size {symbol}"
    return None


def unnamed_arguments(match: Match) -> str | None:
    """Check that an argument without a name in a hand-written pattern has the schema's default on the node."""
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
    """Check that values which the replacement does not produce have no users outside the match, and that it takes none of them.

    In ``s * s`` a wildcard for the second factor is bound to ``s``, which a match of ``sigmoid(x) * y`` makes itself.
    """
    matched = set(site.nodes)
    for name, value in site.bound.items():
        if isinstance(value, fx.Node) and value in matched:
            return f"{name} is {describe(value)}, which the match computes itself"
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
    """Check that all matched operators run on one stream, under one core limit and one deterministic level."""
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
    """Check that nothing writes the reads or results of matched or moved operators between their old and new positions.

    A matched operator may write memory that the match itself allocates, for example in place of its argument, because only
    the outputs show that memory.
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


def draws_in_order(site: Site, placement: Placement) -> str | None:
    """Check that no other operator draws random numbers between the matched ones that do and their new place.

    Each would get the other's numbers. What moves behind the replacement draws none, because `find_placement` moves no effect.
    """
    if not any(map(draws_random_numbers, site.nodes)):
        return None
    node, last = min(site.nodes[0], placement.before), max(site.nodes[-1], placement.before)
    while node <= last:
        if draws_random_numbers(node) and node not in site.nodes:
            return f"{node.name} draws random numbers between the matched operators"
        node = node.next
    return None


def same_metadata(site: Site, results: Sequence[object]) -> str | None:
    """Check that every replaced output with users keeps shape, dtype, strides and device."""
    for output, result in site.replaced_by(results):
        new = result.meta.get("val") if isinstance(result, fx.Node) else result
        changed = difference(output.meta["val"], new)
        if changed:
            return f"{describe(output)} would have {changed}"
    return None


def same_aliasing(site: Site, replacement: fx.Graph, values: Sequence[Any], facts: GraphFacts) -> str | None:
    """Check that every replaced output shares memory with the same inputs and the same other outputs as before.

    Args:
        site: the match.
        replacement: the traced replacement.
        values: the values of its placeholders.
        facts: the graph's facts.
    """
    inside = AliasFacts(replacement)
    pairs = zip(replacement.find_nodes(op="placeholder"), values, strict=True)
    actual = {placeholder: value for placeholder, value in pairs if isinstance(value, fx.Node)}
    replaced = site.replaced_by(output_nodes(replacement))
    input_roots = frozenset().union(*(facts.aliases.roots(node) for node in site.inputs))
    for position, (output, result) in enumerate(replaced):
        if not isinstance(result, fx.Node):
            continue
        shared = frozenset().union(
            *(facts.aliases.roots(source) for twin, source in actual.items() if inside.share_storage(twin, result))
        )
        if shared != facts.aliases.roots(output) & input_roots:
            return f"{describe(output)} would share memory with other inputs than before"
        if not shared and not _begins_alike(output, result):
            return f"{describe(output)} would begin elsewhere in its memory"
        for earlier, other in replaced[:position]:
            now = isinstance(other, fx.Node) and inside.share_storage(other, result)
            if now != facts.aliases.share_storage(earlier, output):
                return f"{describe(output)} and {describe(earlier)} would share memory differently"
    return None


def _begins_alike(old: fx.Node, new: fx.Node) -> bool:
    """Whether two results with memory of their own begin at one offset, which `as_strided` may count from."""
    values = old.meta["val"], new.meta["val"]
    return not all(isinstance(value, torch.Tensor) for value in values) or same_numbers(
        *([value.storage_offset()] for value in values)
    )


def output_nodes(replacement: fx.Graph) -> list[object]:
    """The replacement's results, as a flat list."""
    return tracing.output_leaves(replacement)


@dataclass(frozen=True)
class Placement:
    """The position of the replacement.

    Attributes:
        before: the node in front of which it is inserted.
        late: nodes in front of ``before`` that use a replaced output and so must move behind the replacement, in order.
    """

    before: fx.Node
    late: tuple[fx.Node, ...] = ()


def find_placement(site: Site) -> Placement | str:
    """A position after every input and before every user of an output, or a reason if there is none.

    If an input is defined after a user of an output, that user and the nodes that depend on it move behind the replacement.
    That is possible if nothing in between has an effect and the input does not depend on the output.
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
    # Internal matched nodes need no check, because they depend only on inputs and each other.
    effect = next((node for node in late if has_effect(node)), None)
    if effect is not None:
        return f"{effect.name} uses a replaced output, has an effect, and comes before an input is defined"
    return Placement(last, tuple(late))


def _following(site: Site, first: fx.Node, last: fx.Node) -> dict[fx.Node, None]:
    """The nodes from ``first`` to before ``last`` that depend on a replaced output, except matched nodes."""
    matched, outputs = set(site.nodes), set(site.replaced)
    late: dict[fx.Node, None] = {}
    node = first
    while node is not last:
        sources: Iterable[fx.Node] = node.all_input_nodes
        if node not in matched and any(source in outputs or source in late for source in sources):
            late[node] = None
        node = node.next
    return late
