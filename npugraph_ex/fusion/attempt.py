"""One rule at one node: runs all checks in order, and replaces the match if every check allows it."""

from __future__ import annotations

import os
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._inductor.pattern_matcher import Match, is_match
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from npugraph_ex.fusion import checks, forward_backward, free_strides, tracing
from npugraph_ex.fusion.alike_operands import unlike_operands
from npugraph_ex.fusion.checks import GraphFacts, Site
from npugraph_ex.fusion.conditions import ConditionFailedError, collected_assumptions
from npugraph_ex.fusion.forward_backward import MatchPart
from npugraph_ex.fusion.pattern import match_at
from npugraph_ex.fusion.resemblance import resembling_calls
from npugraph_ex.fusion.rule import PreparedRule
from npugraph_ex.fusion.splice import splice
from npugraph_ex.fusion.trace_cache import TraceCache
from npugraph_ex.graph.launches import Launched
from npugraph_ex.graph.metadata import difference, fake_mode_of, quiet_refusals
from npugraph_ex.graph.source import source_line
from npugraph_ex.report.builder import ReportBuilder
from npugraph_ex.report.passes import Fusion, NearMiss

_TORCH = f"{Path(torch.__file__).parent}{os.sep}"


@dataclass(frozen=True)
class Attempt:
    """One rule at one node; ``near_missed`` collects rules and nodes, by name, with a reason in the report."""

    rule: PreparedRule
    anchor: fx.Node
    facts: GraphFacts
    traces: TraceCache
    report: ReportBuilder
    near_missed: set[tuple[str, str]]

    def run(self) -> str:
        """Replace the match or report a reason. The result is empty, or the reason why this graph must not try the rule again."""
        assert self.rule.pattern is not None  # noqa: S101 - inactive rules are not attempted
        loose, matched = match_at(self.rule.pattern, self.anchor)
        if not is_match(loose):
            alike = resembling_calls(self.rule.pattern, self.anchor, matched)
            if alike:
                progress = (0, len(alike), loose.kwargs.get("position", 0))
                self._near_miss(alike[-1].name, alike, str(loose), progress)
            return ""
        site = Site.from_match(loose)
        unfit = checks.wildcards(self.rule, site) or checks.unnamed_arguments(loose)
        failed = ""
        try:
            reason = unfit or self._judge(loose, site)
        except ConditionFailedError as error:
            reason = failed = str(error)
        if reason is not None:
            self._near_miss(site.name, site.nodes, reason, (1 if unfit else 2,))
        return failed

    def _near_miss(self, name: str, nodes: Sequence[fx.Node], reason: str, progress: tuple[int, ...]) -> None:
        self.near_missed.update((self.rule.rule.name, node.name) for node in nodes)
        would_save = Launched(self.rule.saves)
        miss = NearMiss(self.rule.rule.name, name, reason, source_line(max(nodes)), would_save)
        self.report.add_near_miss(miss, progress)

    def _judge(self, loose: Match, site: Site, *, again: bool = False) -> str | None:
        """None after a replacement, otherwise the first reason against it; cheap checks come first."""
        reason = checks.vanishing_values(site) or checks.one_scope(site, self.facts)
        return reason or self._judge_precisely(loose, site, again=again)

    def _judge_precisely(self, loose: Match, site: Site, *, again: bool) -> str | None:
        mode = fake_mode_of(self.facts.graph)
        if mode is None:
            return "the graph has no fake tensors to check the match with"
        values = self.rule.structured(site.bound)
        with mode, quiet_refusals():
            examples = self.rule.structured({name: self._example(name, value) for name, value in site.bound.items()})
            if self.rule.rule.pattern is None:
                match = self._precise_match(examples)
                if isinstance(match, str):
                    return match
                exact = Site.from_match(match, site.bound)
                if exact != site:
                    return self._judge_other(match, exact, again=again)
                match.kwargs = {**match.kwargs, **dict(zip(self.rule.arguments, values, strict=True))}
            else:
                unlike = self._unlike_search(site, examples)
                if unlike is not None:
                    return unlike
                match = loose
            with collected_assumptions() as assumed:
                reason = self._ask_condition(match)
                return self._replace(site, examples, values, assumed) if reason is None else reason

    def _judge_other(self, match: Match, site: Site, *, again: bool) -> str | None:
        """As ``_judge``, of the precise match: of several calls that the loose one may have, the numbers say which it is."""
        if again:
            return "the pattern fits several operators, and no match is that of its own inputs"
        return checks.wildcards(self.rule, site) or self._judge(match, site, again=True)

    def _ask_condition(self, match: Match) -> str | None:
        try:
            return self.rule.rule.condition(match)
        except ConditionFailedError:
            raise
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            last = next(frame for frame in reversed(frames) if not frame.filename.startswith(_TORCH))
            raise ConditionFailedError(
                f"its condition raised {type(error).__name__}: {error} ({last.filename}:{last.lineno})"
            ) from error

    def _example(self, name: str, value: Any) -> Any:
        """A new fake tensor like the node bound to the wildcard ``name``; other values unchanged."""
        if not isinstance(value, fx.Node):
            return value
        example = tracing.fresh(value.meta["val"])
        if isinstance(example, torch.Tensor) and (example.is_floating_point() or example.is_complex()):
            example.requires_grad_(name in self.rule.with_gradient)
        return example

    def _unlike_search(self, site: Site, examples: list[Any]) -> str | None:
        """The difference between a match of a hand-written pattern and the search function's results for the same inputs.

        Such a pattern may ignore arguments that determine the shape; the search function does not.
        """
        results = self.traces.search_results(self.rule, examples)
        if isinstance(results, str):
            return results
        if len(results) != len(site.outputs):
            return None  # the pattern decides, not the search function
        for output, result in zip(site.outputs, results, strict=True):
            changed = difference(result, output.meta["val"])
            if changed:
                return f"{checks.describe(output)} has {changed}, which search_fn gives for these inputs"
        return None

    def _precise_match(self, examples: list[Any]) -> Match | str:
        """Match again with the search function traced on the actual inputs."""
        pattern = self.traces.precise_pattern(self.rule, examples)
        if isinstance(pattern, str):
            return pattern
        match, _ = match_at(pattern, self.anchor)
        if not is_match(match):
            return str(match)
        return checks.sizes(match, tracing.named_symbols(examples)) or match

    def _replace(self, site: Site, examples: list[Any], values: list[Any], assumed: list[torch.SymBool]) -> str | None:
        parts = forward_backward.place_parts(site, self.rule.flat_names)
        if isinstance(parts, str):
            return parts
        unordered = (checks.draws_in_order(part.site, part.placement) for part in parts)
        reason = next(filter(None, unordered), None)
        reason = reason or checks.undisturbed(site, [part.placement for part in parts], self.facts)
        if reason is not None:
            return reason
        replacement = self.traces.replacement(self.rule, examples)
        if isinstance(replacement, str):
            return replacement
        arguments = _arguments(site, replacement.graph, values)
        relaid = self._fit(site, parts, replacement.graph, arguments)
        if isinstance(relaid, str):
            return relaid
        names, source = tuple(node.name for node in site.nodes), source_line(site.nodes[-1])
        saves = Launched.of(site.nodes) - Launched.of(replacement.graph.nodes)
        new = splice(site, parts, replacement.graph, arguments, self.facts)
        free_strides.apply_new_values(relaid, new)
        by = tuple(node.name for node in new if isinstance(node.target, OpOverload))
        # Make all texts first, because a guard on one condition may simplify the next one to True.
        guards = (*replacement.guards, *map(str, assumed))
        for condition in assumed:
            bool(condition)
        self.report.add_fusion(
            Fusion(self.rule.rule.name, names, by, source, tuple(dict.fromkeys(guards)), saves=saves)
        )
        return None

    def _fit(
        self, site: Site, parts: Sequence[MatchPart], replacement: fx.Graph, arguments: Sequence[Any]
    ) -> dict[fx.Node, Any] | str:
        """The nodes whose metadata the replacement changes (for most rules none), or a reason against it."""
        results = checks.output_nodes(replacement)
        relaid: dict[fx.Node, Any] | str = {}
        if self.rule.rule.free_strides:
            relaid = free_strides.new_values(site, results, self.facts.graph)
        else:
            relaid = checks.same_metadata(site, results) or relaid
        if isinstance(relaid, str):
            return relaid
        unlike = unlike_operands(replacement) or checks.same_aliasing(site, replacement, arguments, self.facts)
        return (
            unlike
            or forward_backward.backward_reads_overwritten_input(parts, replacement, arguments, self.facts)
            or relaid
        )


def _arguments(site: Site, replacement: fx.Graph, values: list[Any]) -> list[Any]:
    """The values of the placeholders of ``replacement``: ``values``, then tangents in a joint graph."""
    flat = pytree.tree_leaves(values)
    further = replacement.find_nodes(op="placeholder")[len(flat) :]
    return [*flat, *(site.bound[node.name] for node in further)]
