"""Remembers, during one run of the fusion pass, what a rule's functions trace to for given inputs.

The layers of a model repeat, and tracing is by far the most costly step of a match. Two matches whose inputs have the
same metadata and numbers share their traces, which nobody edits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._inductor.pattern_matcher import PatternExpr
from torch.utils import _pytree as pytree

from npugraph_ex.fusion import tracing
from npugraph_ex.fusion.pattern import pattern_of
from npugraph_ex.fusion.registry import warn_once
from npugraph_ex.fusion.rule import PreparedRule
from npugraph_ex.passes.aliases import written_by


@dataclass(frozen=True)
class TracedReplacement:
    """A replacement for particular inputs, and the assumptions on symbolic sizes that tracing it made."""

    graph: fx.Graph
    guards: tuple[str, ...]


@dataclass
class Traces:
    """The traces of one run; a ``str`` in place of a trace says why there is none."""

    _patterns: dict[object, PatternExpr | str] = field(default_factory=dict)
    _replacements: dict[object, TracedReplacement | str] = field(default_factory=dict)
    _results: dict[object, list[Any] | str] = field(default_factory=dict)

    def precise_pattern(self, rule: PreparedRule, examples: Sequence[Any]) -> PatternExpr | str:
        """The pattern of the search function for inputs like ``examples``: numbers and dtypes count."""
        key = (id(rule), _signature(examples))
        if key not in self._patterns:
            self._patterns[key] = _precise_pattern(rule, examples)
        return self._patterns[key]

    def search_results(self, rule: PreparedRule, examples: Sequence[Any]) -> list[Any] | str:
        """What the search function returns for inputs like ``examples``, as fake tensors."""
        key = (id(rule), _signature(examples))
        if key not in self._results:
            self._results[key] = _search_results(rule, examples)
        return self._results[key]

    def replacement(self, rule: PreparedRule, examples: Sequence[Any]) -> TracedReplacement | str:
        """The replacement for inputs like ``examples``."""
        key = (id(rule), _signature(examples))
        if key not in self._replacements:
            self._replacements[key] = _replacement(rule, examples)
        return self._replacements[key]


def _signature(examples: Sequence[Any]) -> tuple[object, ...]:
    """Equal for inputs that trace alike; symbols of one graph are told apart by their expressions."""
    leaves, spec = pytree.tree_flatten(list(examples))
    parts: list[object] = [str(spec)]
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            parts.append((leaf.dtype, leaf.device, str(tuple(leaf.shape)), str(leaf.stride())))
        else:
            parts.append((type(leaf), str(leaf)))
    return tuple(parts)


def _precise_pattern(rule: PreparedRule, examples: Sequence[Any]) -> PatternExpr | str:
    try:
        search = tracing.trace_with_symbols(rule.rule.search, examples, rule.rule.trace_fn)
    except Exception as error:  # noqa: BLE001 - whatever a user's function raises on these inputs, it does not match
        return f"the search function does not accept these inputs: {type(error).__name__}: {error}"
    symbols = [f"symbol_{number}" for number in range(len(tracing.symbols_of(examples)))]
    return pattern_of(search.graph, [*symbols, *rule.flat_names])


def _search_results(rule: PreparedRule, examples: Sequence[Any]) -> list[Any] | str:
    try:
        graph = tracing.trace(rule.rule.search, examples, rule.rule.trace_fn).graph
    except Exception as error:  # noqa: BLE001 - as above
        return f"the search function does not accept these inputs: {type(error).__name__}: {error}"
    output = next(iter(graph.find_nodes(op="output")))
    return [leaf.meta["val"] if isinstance(leaf, fx.Node) else leaf for leaf in pytree.tree_leaves(output.args[0])]


def _replacement(rule: PreparedRule, examples: Sequence[Any]) -> TracedReplacement | str:
    environment = next((symbol.node.shape_env for symbol in tracing.symbols_of(examples)), None)
    before = len(environment.guards) if environment is not None else 0
    try:
        graph = tracing.trace(rule.rule.replace, examples, rule.rule.trace_fn).graph
    except Exception as error:  # noqa: BLE001 - a missing operator may fail in any way; the original stays
        reason = f"its replacement cannot be traced: {type(error).__name__}: {error}"
        warn_once(rule.rule.name, reason)
        return reason
    writer = next((node for node in graph.nodes if written_by(node)), None)
    if writer is not None:
        return f"the replacement writes memory ({writer.target})"
    if any(node.op == "get_attr" for node in graph.nodes):
        return "the replacement reads a tensor from its surroundings; pass it as an argument"
    guards = environment.guards[before:] if environment is not None else ()
    return TracedReplacement(graph, tuple(str(guard.expr) for guard in guards))
