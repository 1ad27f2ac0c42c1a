"""Lifts what the forms propose, where the graph allows it and the judge admits it, and reports the rest.

The questions about the graph are those of fusion: streams, writes in between, metadata, shared memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from npugraph_ex import _torch_private
from npugraph_ex.fusion import checks, free_strides
from npugraph_ex.fusion.alike_operands import unlike_operands
from npugraph_ex.fusion.checks import GraphFacts, Site
from npugraph_ex.fusion.forward_backward import MatchPart
from npugraph_ex.fusion.splice import splice
from npugraph_ex.fusion.tracing import fresh
from npugraph_ex.graph import metadata, noops
from npugraph_ex.graph.launches import NOTHING, Launched
from npugraph_ex.graph.memory.aliases import output_values, tensor_leaves
from npugraph_ex.graph.metadata import fake_mode_of
from npugraph_ex.graph.operators import is_view
from npugraph_ex.graph.source import source_line
from npugraph_ex.lifting import changes, constants, joined_weights, repeated
from npugraph_ex.lifting.forms import FORMS, softmax_attention, swiglu
from npugraph_ex.lifting.forms.joined_gates import JoinedGeGlu, JoinedSwiGlu
from npugraph_ex.lifting.forms.joined_projections import JoinedProjections
from npugraph_ex.lifting.judging import Ruling, judge, signature
from npugraph_ex.lifting.proposal import Build, Change, Emit, Form, Proposal, Unlike
from npugraph_ex.lifting.subgraph import Subgraph
from npugraph_ex.report.builder import ReportBuilder
from npugraph_ex.report.passes import Fusion, NearMiss, off_without

_JOINING: tuple[type[JoinedSwiGlu | JoinedProjections], ...] = (JoinedSwiGlu, JoinedGeGlu, JoinedProjections)
"""Forms for graphs whose parameters are known; gate and up come first."""

_LIFT = {"lift": "judged"}
for _name in (constants.NAME, *(form.name for form in FORMS), repeated.NAME):
    off_without(_name, _LIFT)
for _one in _JOINING:
    off_without(_one.name, {**_LIFT, "join_projections": True})


def lift(
    graph: fx.Graph,
    report: ReportBuilder,
    *,
    exact: bool,
    parameters: Mapping[fx.Node, torch.Tensor] | None,
    every_row_attends: bool = False,
) -> None:
    """Lift every form wherever it holds.

    Args:
        graph: an inference graph with fake tensors in ``meta["val"]``; is edited in place.
        report: learns what was lifted, with its distance from float64, and what was not, with the reason.
        exact: whether every bit must be eager mode's.
        parameters: those that may be joined, with their values; None where none may.
        every_row_attends: whether the user declares that attention has no row without a key.
    """
    mode = fake_mode_of(graph)
    if mode is None:
        return
    _remove_noops(graph, report)
    facts = GraphFacts.from_graph(graph)
    if constants.fold(facts, report):
        _refresh(graph, _views(facts, graph.nodes))
        facts = GraphFacts.from_graph(graph)
    joining: list[Form] = [] if parameters is None else [one(parameters) for one in _JOINING]
    won: dict[object, tuple[Launched, str]] = {}
    attention: Form = softmax_attention.DECLARED if every_row_attends else softmax_attention.FORM
    forms = (*(attention if form is softmax_attention.FORM else form for form in FORMS), *joining)
    _announce(forms, report)
    # Projections with biases that were joined are halves of one tensor.
    forms += (swiglu.SWIGLU, swiglu.GEGLU) if joining else ()
    if repeated.join(facts, report, chosen=True):  # so that a form sees one table where the program reads it again
        _refresh(graph, _views(facts, graph.nodes))
        facts = GraphFacts.from_graph(graph)
    for form in forms:
        ends = form.ends_with
        # The last operators first: what ends a spelling may look like a smaller one by itself.
        for node in reversed(list(graph.nodes)):
            if not _torch_private.is_erased(node) and node.op == "call_function" and node.target in ends:
                with mode:
                    _LiftingAttempt(form, node, facts, report, won, exact=exact).run()
    if constants.fold(facts, report):  # what replacements fill, such as the weight of a norm that has none
        _refresh(graph, _views(facts, graph.nodes))
        facts = GraphFacts.from_graph(graph)
    repeated.join(facts, report)
    if parameters:
        joined_weights.take_out(graph, parameters)


def _announce(forms: Sequence[Form], report: ReportBuilder) -> None:
    """Each form has its row in the report, in the order in which they are tried."""
    for form in forms:
        report.add_rule(form.name)
    for one in _JOINING:
        if one.name not in {form.name for form in forms}:
            report.add_rule(one.name, "the option 'join_projections' is off")


def _remove_noops(graph: fx.Graph, report: ReportBuilder) -> None:
    """Remove what changes nothing, and report the arithmetic: the other passes leave that."""
    arithmetic = {
        node: repeated.same_bits(node, node.args[0])
        for node in graph.nodes
        if node.target in noops.IDENTITY_ARITHMETIC and isinstance(node.args[0], fx.Node)
    }
    views = list(filter(metadata.shares_memory, graph.nodes))
    noops.remove(graph, arithmetic=True)
    for node, removed in arithmetic.items():
        if _torch_private.is_erased(node):
            report.add_fusion(removed)
    _refresh(graph, views)


def _views(facts: GraphFacts, nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """Those of the nodes whose results lie in other values' memory, as far as the facts know the nodes."""
    known = facts.aliases
    return [node for node in nodes if metadata.shares_memory(node) or (node in known and not known.is_own(node))]


def _refresh(graph: fx.Graph, views: Iterable[fx.Node]) -> list[fx.Node]:
    """Where a value was replaced, a view of it has the old value's memory in its metadata, and looks like a copy.

    Returns:
        Those of ``views``, and of the views of them, whose metadata is new.
    """
    return metadata.refresh(graph, [node for node in views if not is_view(node)])


def refuse(report: ReportBuilder, why: str) -> None:
    """Say of every form why it was not tried."""
    for name in (constants.NAME, *(form.name for form in FORMS), *(form.name for form in _JOINING), repeated.NAME):
        report.add_rule(name, why)


@dataclass(frozen=True)
class _Admitted:
    """All that putting an operator in the place of a subgraph takes, and what it saves."""

    proposal: Proposal
    subgraph: Subgraph
    part: MatchPart
    replacement: fx.Graph
    relaid: Mapping[fx.Node, Any]
    saves: Launched
    ruling: Ruling


@dataclass(frozen=True)
class _LiftingAttempt:
    """One form at one node."""

    form: Form
    node: fx.Node
    facts: GraphFacts
    report: ReportBuilder
    won: dict[object, tuple[Launched, str]]
    """What changed programs launch, for the other layers of the model."""
    exact: bool

    def run(self) -> None:
        """Lift, or say why not."""
        found = self.form.read(self.node)
        if isinstance(found, Unlike):
            self.report.add_near_miss(self._unlike(found), (1,))
        elif found is not None:
            lifting = self.admitted(found)
            if isinstance(lifting, str):
                other = found.otherwise
                miss = (
                    self._near_miss(self.node, lifting)
                    if other is None
                    else self._changed(replace(other, reason=lifting))
                )
                self.report.add_near_miss(miss, (2,))
            else:
                self._lift(lifting)

    def _near_miss(self, node: fx.Node, reason: str, saves: Launched = NOTHING, lines: str = "") -> NearMiss:
        return NearMiss(self.form.name, node.name, reason, source_line(node), saves, lines)

    def _unlike(self, found: Unlike) -> NearMiss:
        """With what would lift it: a declaration, and a change of the program that saves kernels, or why that saves none."""
        miss = self._changed(found)
        lifting = None if found.declared is None else self.admitted(found.declared)
        if not isinstance(lifting, _Admitted) or lifting.proposal.assumed is None:
            return miss
        option = lifting.proposal.assumed.option
        reason = f"{miss.reason}; {option}=True declares that there is no such row"
        return replace(miss, reason=reason, option=option, option_saves=lifting.saves)

    def _changed(self, found: Unlike) -> NearMiss:
        if found.change is None:
            return self._near_miss(found.node, found.reason, lines=found.lines)
        saves, reason = self._won_by(found.change)
        if reason:
            return replace(self._near_miss(found.node, f"{found.reason}; {reason}"), would_cost=NOTHING - saves)
        return self._near_miss(found.node, f"{found.reason}; {found.change.mend}", saves, found.change.lines)

    def _won_by(self, change: Change) -> tuple[Launched, str]:
        """What a change of the program saves, or why it should not be made."""
        subgraph = Subgraph.of(change.now)
        unfit = subgraph if isinstance(subgraph, str) else _unfit(change.now)
        if isinstance(subgraph, str) or unfit is not None:
            return NOTHING, unfit or ""
        alike = (change.name, change.lines, *signature(change.now, subgraph, fx.Graph()))
        if alike not in self.won:
            self.won[alike] = self._launched_by(change)
        then, reason = self.won[alike]
        saves = Launched.of(subgraph.vanishing) - then
        return saves, "" if saves.kernels > 0 else f"{change.name} would launch {then.kernels} kernels here{reason}"

    def _launched_by(self, change: Change) -> tuple[Launched, str]:
        """What a changed program launches, and why its operators are not lifted."""
        gm = changes.traced(change, fake_mode_of(self.facts.graph))
        then = Launched.of(gm.graph.nodes)
        node, *_ = output_values(gm.graph)
        found = self.form.read(node) if isinstance(node, fx.Node) else None
        reason = ""
        if isinstance(found, Proposal):
            lifting = replace(self, facts=GraphFacts.from_graph(gm.graph)).admitted(found)
            if isinstance(lifting, str):
                reason = f", because {lifting}"
            else:
                then -= lifting.saves
        return then, reason

    def admitted(self, proposal: Proposal) -> _Admitted | str:
        """What is lifted, or the first reason against it; cheap questions first."""
        subgraph = Subgraph.of(proposal)
        if isinstance(subgraph, str):
            return subgraph
        unfit = _unfit(proposal)
        if unfit is not None:
            return unfit
        bound = {str(position): node for position, node in enumerate(proposal.inputs)}
        whole = Site(subgraph.nodes, subgraph.outputs, bound)
        # A node on the way that stays may use a result, such as the places of the largest elements.
        site = Site(subgraph.vanishing, subgraph.outputs, bound)
        placement = checks.find_placement(site)
        if isinstance(placement, str):
            return placement
        reason = checks.one_scope(whole, self.facts) or checks.undisturbed(whole, [placement], self.facts)
        if reason is not None:
            return reason
        found = self._replacement(proposal, site)
        if isinstance(found, str):
            return found
        replacement, relaid = found
        saves = Launched.of(subgraph.vanishing) - Launched.of(joined_weights.in_a_call(replacement))
        if saves.kernels <= 0:
            return "nothing would be saved: it starts as many kernels, or others use what is computed on the way"
        ruling = self._ruling(proposal, subgraph, replacement)
        if ruling.reason:
            return ruling.reason
        return _Admitted(proposal, subgraph, MatchPart(site, placement), replacement, relaid, saves, ruling)

    def _lift(self, lifting: _Admitted) -> None:
        """Put the operator in the place of the subgraph."""
        subgraph, ruling = lifting.subgraph, lifting.ruling
        gone = tuple(node.name for node in subgraph.vanishing)
        staying = tuple(node.name for node in subgraph.nodes if node not in subgraph.vanishing)
        source = source_line(subgraph.outputs[-1])
        inputs = lifting.proposal.inputs
        new = splice(lifting.part.site, [lifting.part], lifting.replacement, inputs, self.facts)
        free_strides.apply_new_values(lifting.relaid, new)
        self._update_facts(new, lifting.relaid)
        for node in new:
            metadata.trust(node)
        by = tuple(node.name for node in new if isinstance(node.target, torch._ops.OpOverload))
        ulps = (ruling.ulps, ruling.eager_ulps)
        fusion = Fusion(self.form.name, gone, by, source, ulps=ulps, saves=lifting.saves, recomputed=staying)
        assumed = lifting.proposal.assumed
        self.report.add_fusion(fusion if assumed is None else replace(fusion, assumes=assumed.option))

    def _update_facts(self, new: list[fx.Node], relaid: Iterable[fx.Node]) -> None:
        """Let the facts know the graph with the ``new`` nodes and the ``relaid`` ones, whose metadata is another."""
        changed = {node for node in (*new, *relaid) if not _torch_private.is_erased(node)}
        users = {user for node in changed for user in node.users}
        changed.update(_refresh(self.facts.graph, _views(self.facts, users)))
        self.facts.aliases.update(sorted(changed))

    def _ruling(self, proposal: Proposal, subgraph: Subgraph, replacement: fx.Graph) -> Ruling:
        """The judge's, of the whole or of its steps."""
        if not proposal.steps:
            return judge(proposal, subgraph, replacement, exact=self.exact)
        rulings = []
        for step in proposal.steps:
            part = Subgraph.of(step)
            assert not isinstance(part, str)  # noqa: S101 - it is a part of a subgraph
            rulings.append(judge(step, part, self._built(step, step.builds[0])[0], exact=self.exact))
        worst = (max(ruling.ulps for ruling in rulings), max(ruling.eager_ulps for ruling in rulings))
        return Ruling(next((ruling.reason for ruling in rulings if ruling.reason), ""), *worst)

    def _built(self, proposal: Proposal, build: Build) -> tuple[fx.Graph, tuple[fx.Node, ...]]:
        """One way to make it, and its results."""
        mode = fake_mode_of(self.facts.graph)
        assert mode is not None  # noqa: S101 - asked before
        emit = Emit(mode)
        placeholders = []
        for position, node in enumerate(proposal.inputs):
            placeholder = emit.graph.placeholder(f"input_{position}")
            placeholder.meta["val"] = fresh(node.meta["val"])
            placeholders.append(placeholder)
        results = build(emit, *placeholders)
        emit.graph.output(results)
        return emit.graph, results

    def _replacement(self, proposal: Proposal, site: Site) -> tuple[fx.Graph, dict[fx.Node, Any]] | str:
        """The first way to make it whose results fit, with the metadata that it changes; why the last one does not."""
        reason = ""
        for build in proposal.builds:
            graph, results = self._built(proposal, build)
            relaid = unlike_operands(graph) or self._relaid(proposal, site, graph, results)
            if not isinstance(relaid, str):
                return graph, relaid
            reason = relaid
        return reason

    def _relaid(
        self, proposal: Proposal, site: Site, replacement: fx.Graph, results: tuple[fx.Node, ...]
    ) -> dict[fx.Node, Any] | str:
        """The metadata that these results change, or why they may not."""
        if proposal.parts:
            return self._shared_memory_shows(proposal) or free_strides.new_values(site, results, self.facts.graph)
        unlike = checks.same_metadata(site, results)
        relaid = (
            unlike
            and (proposal.dense or _of_single_elements(site, results))
            and free_strides.new_values(site, results, self.facts.graph)
        )
        aliased = checks.same_aliasing(site, replacement, proposal.inputs, self.facts)
        return aliased or (relaid if isinstance(relaid, dict) else unlike) or {}

    def _shared_memory_shows(self, proposal: Proposal) -> str:
        """Which output leaves the graph, or is written: then a program can see that outputs share memory."""
        aliases = self.facts.aliases
        leaving = [value for value in output_values(self.facts.graph) if isinstance(value, fx.Node)]
        for node in proposal.outputs:
            if aliases.is_written(node) or any(aliases.share_storage(node, value) for value in leaving):
                return f"{node.name} is written or leaves the graph, and would share memory with the others"
        return ""


def _of_single_elements(site: Site, results: Sequence[fx.Node]) -> bool:
    """Whether results have the strides of the outputs, but for dimensions of one element, where strides tell nothing."""
    for output, result in site.replaced_by(results):
        assert isinstance(result, fx.Node)  # noqa: S101 - a form builds nodes
        old, new = output.meta["val"], result.meta["val"]
        if not metadata.same_numbers(old.shape, new.shape):
            return False
        strides = zip(old.shape, old.stride(), new.stride(), strict=True)
        if any(size != 1 and not statically_known_true(one == other) for size, one, other in strides):
            return False
    return True


def _unfit(proposal: Proposal) -> str | None:
    """Why npu operators do not take these operands, whatever the form."""
    values = {node.name: leaf for node in (*proposal.inputs, *proposal.outputs) for leaf in tensor_leaves(node)}
    for name, value in values.items():
        if value.device.type != "npu":
            return f"{name} is on {value.device}"
        if not statically_known_true(value.numel() > 0):
            return f"{name} may be empty"
    return None
