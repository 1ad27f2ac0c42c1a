"""Finds which parts of a graph equal a fused operator, from the operators' records alone, and writes each as a fusion rule.

The search of superoptimisers: the graph runs once in float64 on random inputs, so that each node has a value, its fingerprint. The
values at each small cut of the nodes before a node go through the formula of each record that takes so many tensors, in each order;
a result that equals the node's value is a candidate. No rule is read. What the candidate computes with other values, in the graph's
own dtypes, is for the judge of lifting: `npugraph_ex/lifting/judging.py`; other sizes are tried by `sizes.py`.

Not found: operators with lists of tensors, that write, draw, communicate, or take more than four tensors; numbers that stand
neither in the lines nor in the record's examples.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from operator import getitem
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from npugraph_ex import _torch_private
from npugraph_ex.discovery.sizes import Dimension, try_other_sizes
from npugraph_ex.fusion.checks import GraphFacts, Site, same_aliasing, same_metadata
from npugraph_ex.graph.launches import Launched, launches
from npugraph_ex.graph.metadata import fake_mode_of, quiet_refusals
from npugraph_ex.graph.source import source_line
from npugraph_ex.lifting import trials
from npugraph_ex.lifting.judging import judge
from npugraph_ex.lifting.proposal import Emit, Proposal
from npugraph_ex.lifting.subgraph import Subgraph
from npugraph_ex.operators import OPERATORS, CpuInterpreter, Operator
from npugraph_ex.testing.targets import device_name

_MOST_TENSORS, _WIDEST, _MOST_CUTS, _MOST_NUMBERS = 4, 7, 600, 256
"""Tensors of an operator, nodes of a cut on the way, cuts before one node, and combinations of numbers for one call."""
_LARGEST = 1024
"""Of the whole numbers that are tried: a larger one may be how often something is repeated."""
_CLOSE = 1e-9
_CAST = torch.ops.aten._to_copy.default  # noqa: SLF001 - the operator's name


@dataclass(frozen=True)
class Discovery:
    """A part of a graph that equals an operator.

    Attributes:
        operator: its name.
        source: ``file:line`` of the part's last node.
        nodes: the names of the nodes that the operator makes needless.
        saves: kernels and bytes that one such part saves.
        ulps: the operator's largest distance from float64 on ordinary inputs, and eager mode's.
        spelled: the part by itself; its placeholders are the inputs.
        fused: the operator in its place, with the same placeholders.
        inputs: the inputs' metadata.
        fixed: dimensions of inputs, counted from the last, and their sizes, that must be so.
    """

    operator: str
    source: str
    nodes: tuple[str, ...]
    saves: Launched
    ulps: tuple[float, float]
    spelled: fx.Graph
    fused: fx.Graph
    inputs: tuple[torch.Tensor, ...]
    fixed: frozenset[Dimension]


@dataclass(frozen=True)
class _Example:
    """How a record's example is called: the names of its tensors, these, and the other arguments by name."""

    record: Operator
    tensors: dict[str, torch.Tensor]
    others: dict[str, Any]


def discover(
    gm: fx.GraphModule,
    operators: Sequence[str] = (),
    *,
    on_found: Callable[[Discovery], object] = lambda _: None,
    reached: Callable[[int, int], object] = lambda _, __: None,
) -> list[Discovery]:
    """The parts of ``gm`` that equal an operator and launch more kernels, the most kernels first, alike ones once.

    Args:
        gm: an AOT inference graph of known sizes with fake tensors in ``meta["val"]``; is not edited.
        operators: names of records, as in ``"npu::npu_rms_norm"``; all when empty. Those that the device lacks are left out.
        on_found: takes each part at once, for who may stop the search.
        reached: takes after how many of how many nodes the search is.

    Returns:
        Of overlapping parts that become the same operator, the one that saves the most.
    """
    inputs = [leaf for node in gm.graph.find_nodes(op="placeholder") for leaf in pytree.tree_leaves(node.meta["val"])]
    sizes = [size for value in inputs for size in (value.shape if isinstance(value, torch.Tensor) else (value,))]
    if fake_mode_of(gm.graph) is None or any(isinstance(size, torch.SymInt) for size in sizes):
        return []
    with trials.on_real_values(), quiet_refusals():
        device = device_name()
        there = [record for record in OPERATORS.values() if record.is_on(device)]
        records = [record for record in there if not operators or record.name in operators]
        examples = [one for record in records for one in _examples(record)]
        search = _PartSearch(gm, examples)
        found: dict[str, Discovery] = {}
        for count, node in enumerate(gm.graph.nodes, 1):
            for one in search.ending_with(node):
                text = _text(one.spelled) + _text(one.fused)
                if text not in found:
                    found[text] = one
                    on_found(one)
            reached(count, len(gm.graph.nodes))
    return sorted(found.values(), key=lambda one: -one.saves.kernels)


def _text(graph: fx.Graph) -> str:
    return str(graph.python_code("self").src)


def _examples(record: Operator) -> Iterator[_Example]:
    """The different kinds of calls among the examples of a record that the search covers."""
    overload = record.overload
    if (
        record.formula is None
        or overload is None
        or not record.is_vendors
        or _torch_private.schema(overload).is_mutable
    ):
        return
    if record.writes or record.across_ranks or record.draws_random_numbers:
        return
    seen = set()
    for args, kwargs in record.calls():
        parameters = _parameters(record)
        given = {parameter.name: value for parameter, value in zip(parameters, args, strict=False)} | kwargs
        tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
        others = {name: value for name, value in given.items() if name not in tensors}
        lists = any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(others))
        kind = (tuple((name, one.dim()) for name, one in tensors.items()), str(others))
        if 0 < len(tensors) <= _MOST_TENSORS and not lists and kind not in seen:
            seen.add(kind)
            yield _Example(record, tensors, others)


def _parameters(record: Operator) -> list[Any]:
    """Of the operator's schema."""
    assert record.overload is not None  # noqa: S101 - asked before
    return list(_torch_private.schema(record.overload).arguments)


@dataclass
class _PartSearch:
    """The graph with its values, and what was computed of them already."""

    gm: fx.GraphModule
    examples: list[_Example]
    values: dict[fx.Node, Any] = field(init=False)
    facts: GraphFacts = field(init=False)
    shaped: dict[Any, list[fx.Node]] = field(default_factory=dict)
    """Nodes by the shape of their value."""
    shapes: dict[tuple[Any, ...], set[torch.Size]] = field(default_factory=dict)
    computed: dict[tuple[Any, ...], set[fx.Node]] = field(default_factory=dict)
    """What each call so far gives, shapes and nodes: a cut stands before many nodes."""

    def __post_init__(self) -> None:
        placeholders = self.gm.graph.find_nodes(op="placeholder")
        self.facts = GraphFacts.from_graph(self.gm.graph)
        with trials.on_real_values():
            (drawn, *_) = itertools.islice(trials.ordinary(placeholders, trials.Sizes()), 1)
            wide = [
                value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
                for value in drawn
            ]
            interpreter = _Remembering(self.gm, wide=True)
            interpreter.run(*wide)
        self.values = interpreter.values
        for node, value in self.values.items():
            self.shaped.setdefault(getattr(value, "shape", None), []).append(node)

    def ending_with(self, node: fx.Node) -> list[Discovery]:
        """For each operator the part that ends with ``node`` and saves the most."""
        best: dict[str, Discovery] = {}
        if not isinstance(self.values.get(node), torch.Tensor) or not (launches(node) or node.target is getitem):
            return []
        for cut in _cuts(node):
            part = Subgraph.of(Proposal(cut, (node,), ()))
            if isinstance(part, str) or Launched.of(part.nodes).kernels < 2:
                continue
            for example in self.examples:
                if len(example.tensors) == len(cut):
                    one = self._matched(node, cut, part, example)
                    if one is not None and (
                        one.operator not in best or best[one.operator].saves.kernels < one.saves.kernels
                    ):
                        best[one.operator] = one
        return list(best.values())

    def _matched(self, node: fx.Node, cut: tuple[fx.Node, ...], part: Subgraph, example: _Example) -> Discovery | None:
        """The first order of the cut, and the first numbers, with which the operator computes the node."""
        tried: list[dict[str, Any]] = []
        for order in itertools.permutations(cut):
            if not self._fits(order, example):
                continue
            tried = tried or list(_numbers(example, part))
            for numbers in tried:
                results = self._results(node, order, example, numbers)
                places = [at for at, one in enumerate(results) if _equal(one, self.values[node])]
                for place in places:  # of equal results one has the right dtype
                    made = self._judged(_CandidateCall(example, order, numbers, results, place), node)
                    if made is not None:
                        return made
        return None

    def _results(
        self, node: fx.Node, order: Sequence[fx.Node], example: _Example, numbers: dict[str, Any]
    ) -> list[Any]:
        """What the operator gives; nothing where it refuses, or where it is known by now that ``node`` is not among it.

        The shapes of results, and a refusal, follow from shapes and numbers; from whole numbers in tensors perhaps too.
        """
        given = {name: self.values[one] for name, one in zip(example.tensors, order, strict=True)}
        call: tuple[Any, ...] = (id(example), *map(str, numbers.values()))
        alike = (
            *call,
            *(one.shape if one.is_floating_point() else at for one, at in zip(given.values(), order, strict=True)),
        )
        if self.values[node].shape not in self.shapes.get(alike, {self.values[node].shape}):
            return []
        call += tuple(order)
        if node not in self.computed.get(call, {node}):
            return []
        results: list[Any] = []
        with suppress(Exception):  # what the formula refuses is no match
            results = pytree.tree_leaves(example.record.formula(**given, **numbers))  # type: ignore[misc]
        self.shapes[alike] = {one.shape for one in results if isinstance(one, torch.Tensor)}
        pairs = ((one, other) for one in results for other in self.shaped.get(getattr(one, "shape", None), ()))
        self.computed[call] = {other for one, other in pairs if _equal(one, self.values[other])}
        return results

    def _fits(self, order: Sequence[fx.Node], example: _Example) -> bool:
        """Whether ranks, kinds of numbers and equal last sizes are those of the example."""
        tensors = list(example.tensors.values())
        values = [self.values[one] for one in order]
        for one, value in zip(tensors, values, strict=True):
            same_rank = one.dim() == value.dim() or min(one.dim(), value.dim()) > 1
            if not same_rank or one.is_floating_point() != value.is_floating_point() or not value.dim():
                return False
        return all(
            (left.shape[-1:] != right.shape[-1:]) or (values[at].shape[-1:] == values[other].shape[-1:])
            for (at, left), (other, right) in itertools.combinations(enumerate(tensors), 2)
        )

    def _judged(self, call: _CandidateCall, node: fx.Node) -> Discovery | None:
        """The candidate with all its results that the graph uses, if it saves kernels and the judge admits it."""
        outputs, places = [node], [call.place]
        inside = Subgraph.of(Proposal(call.order, (node,), ()))
        assert not isinstance(inside, str)  # noqa: S101 - asked before
        for at, result in enumerate(call.results):
            for other in inside.nodes:
                used = any(user not in inside.nodes for user in other.users) and other is not node
                if at not in places and used and _equal(result, self.values.get(other)):
                    outputs.append(other)
                    places.append(at)
        mode = fake_mode_of(self.gm.graph)
        assert mode is not None  # noqa: S101 - asked before
        emit = Emit(mode)
        for position, one in enumerate(call.order):
            emit.graph.placeholder(f"input_{position}").meta["val"] = one.meta["val"]
        topk = next((one for one in inside.nodes if one.target is torch.ops.aten.topk.default), None)
        proposal = Proposal(call.order, tuple(outputs), (), ranked=topk and topk.args[0], named=_sizes(call.order))  # type: ignore[arg-type]
        part = Subgraph.of(proposal)
        results: list[fx.Node] = []
        with suppress(Exception), mode:
            results = call.made(emit, outputs, places)
        if isinstance(part, str) or not results:
            return None
        emit.graph.output(tuple(results))
        saves = Launched.of(part.vanishing) - Launched.of(emit.graph.nodes)
        site = Site(part.vanishing, part.outputs, {str(at): one for at, one in enumerate(call.order)})
        if (
            saves.kernels <= 0
            or same_metadata(site, results)
            or same_aliasing(site, emit.graph, call.order, self.facts)
        ):
            return None
        with mode:
            ruling = judge(proposal, part, emit.graph, exact=False)
        if ruling.reason:
            return None
        inputs = tuple(one.meta["val"] for one in call.order)
        others = try_other_sizes(part.alone(lambda size: size), emit.graph, inputs, _equal)
        if others.wrong:
            return None
        ulps = (ruling.ulps, ruling.eager_ulps)
        names = tuple(one.name for one in part.vanishing)
        return Discovery(
            call.example.record.name,
            source_line(node),
            names,
            saves,
            ulps,
            _alone(part),
            emit.graph,
            inputs,
            others.fixed,
        )


@dataclass(frozen=True)
class _CandidateCall:
    """A call of an operator on nodes, its results in float64, and which of these was looked for."""

    example: _Example
    order: tuple[fx.Node, ...]
    numbers: dict[str, Any]
    results: list[Any]
    place: int

    def made(self, emit: Emit, outputs: Sequence[fx.Node], places: Sequence[int]) -> list[fx.Node]:
        """The call with a node for each of these outputs, cast where dtypes differ."""
        record = self.example.record
        given = dict(zip(self.example.tensors, emit.graph.find_nodes(op="placeholder"), strict=True)) | self.numbers
        parameters = _parameters(record)
        ahead = itertools.takewhile(lambda one: one.name in given and not one.kwarg_only, parameters)
        args = [given.pop(one.name) for one in list(ahead)]
        node = emit(record.overload, *args, **given)
        one = len(self.results) == 1
        found = [node if one else emit(getitem, node, at) for at in places]
        return [
            made
            if made.meta["val"].dtype == output.meta["val"].dtype
            else emit(_CAST, made, dtype=output.meta["val"].dtype)
            for made, output in zip(found, outputs, strict=True)
        ]


class _Remembering(CpuInterpreter):
    """Keeps the value of each node."""

    values: dict[fx.Node, Any]

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run all."""
        self.values = {}
        return super().run(*args, **kwargs)

    def run_node(self, n: fx.Node) -> Any:
        """Run one node, and keep its value."""
        self.values[n] = super().run_node(n)
        return self.values[n]


def _cuts(node: fx.Node) -> Iterator[tuple[fx.Node, ...]]:
    """Sets of nodes that each way from an input to ``node`` goes through, the nearest first."""
    start = frozenset(node.all_input_nodes)
    waiting, seen, given = [start], {start}, 0
    while waiting and given < _MOST_CUTS:
        cut = waiting.pop(0)
        if 0 < len(cut) <= _MOST_TENSORS and all(isinstance(one.meta.get("val"), torch.Tensor) for one in cut):
            given += 1
            yield tuple(sorted(cut))
        # The last first: a node that another one of the cut needs stays until that one is taken apart.
        for one in sorted(cut, reverse=True):
            further = (cut - {one}) | set(one.all_input_nodes)
            if one.op == "call_function" and len(further) <= _WIDEST and further not in seen:
                seen.add(further)
                waiting.append(further)


def _numbers(example: _Example, part: Subgraph) -> Iterator[dict[str, Any]]:
    """The other arguments: those of the example, with numbers of the part in the place of its numbers, and of defaults."""
    leaves = [leaf for node in part.nodes for leaf in pytree.tree_leaves((node.args, dict(node.kwargs)))]
    known = [
        leaf for leaf in dict.fromkeys(leaves) if type(leaf) is float or (type(leaf) is int and abs(leaf) <= _LARGEST)
    ]
    written = {kind: [leaf for leaf in known if type(leaf) is kind] for kind in (float, int)}
    choices: dict[str, list[Any]] = {}
    for parameter in _parameters(example.record):
        name = parameter.name
        if name in example.tensors:
            continue
        value = example.others.get(name, parameter.default_value if parameter.has_default_value() else None)
        fractional = type(value) is float
        if name in example.others or fractional:
            own = written[type(value)] if isinstance(value, (int, float)) and type(value) in written else []
            usual = [parameter.default_value] if type(parameter.default_value) is type(value) else []
            choices[name] = (
                list(dict.fromkeys([*own, *usual, value])) if isinstance(value, (int, float, str)) else [value]
            )
    combinations = itertools.product(*choices.values())
    for combination in itertools.islice(combinations, _MOST_NUMBERS):
        yield dict(zip(choices, combination, strict=True))


def _sizes(nodes: Sequence[fx.Node]) -> tuple[Any, ...]:
    """All sizes, so that trials keep them."""
    return tuple(size for node in nodes for size in node.meta["val"].shape)


def _equal(result: object, value: object) -> bool:
    if not isinstance(result, torch.Tensor) or not isinstance(value, torch.Tensor) or result.shape != value.shape:
        return False
    if result.is_floating_point() != value.is_floating_point() or not value.numel():
        return False
    if not value.is_floating_point():
        return bool((result == value).all())
    return torch.allclose(result.double(), value.double(), rtol=_CLOSE, atol=_CLOSE * float(value.abs().max()))


def _alone(part: Subgraph) -> fx.Graph:
    """A copy of the part by itself."""
    graph = fx.Graph()
    twins = {node: graph.placeholder(f"input_{position}") for position, node in enumerate(part.inputs)}
    for node in part.nodes:  # named anew: two parts that are alike have one text
        args, kwargs = fx.map_arg((node.args, node.kwargs), twins.__getitem__)
        twins[node] = graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
    graph.output(tuple(twins[node] for node in part.outputs))
    return graph
