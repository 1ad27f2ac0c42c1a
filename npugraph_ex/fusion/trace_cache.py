"""Caches the traces of a rule's functions for given inputs, for one run of the fusion pass.

The layers of a model repeat, and tracing is by far the slowest step of a match. Two matches with the same metadata and
numbers share their traces, which are never edited. Traces of built-in rules for sizes without symbols are kept after the run,
because they depend only on the arguments.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import fx
from torch._inductor.pattern_matcher import PatternExpr
from torch.utils import _pytree as pytree

from npugraph_ex._torch_private import active_fake_mode
from npugraph_ex.fusion import tracing
from npugraph_ex.fusion.pattern import pattern_of
from npugraph_ex.fusion.registry import warn_once
from npugraph_ex.fusion.rule import PreparedRule
from npugraph_ex.fusion.rules import BUILT_IN
from npugraph_ex.graph.memory.aliases import written_by
from npugraph_ex.graph.metadata import fake_mode_of


@dataclass
class TracedReplacement:
    """A replacement for particular inputs, and the trace's assumptions on symbolic sizes."""

    graph: fx.Graph
    guards: tuple[str, ...]
    _used: bool = False

    def on(self, examples: Sequence[Any]) -> TracedReplacement:
        """A copy with new metadata for ``examples``, whose fake mode is active; the first time this object itself.

        Without a copy, the results of a second match would seem to share memory with those of the first.
        """
        if not self._used and fake_mode_of(self.graph) is active_fake_mode():
            self._used = True
            return self
        leaves = pytree.tree_leaves(list(examples))
        # A joint graph has tangents too, and these have no examples.
        tangents = self.graph.find_nodes(op="placeholder")[len(leaves) :]
        given = iter([*leaves, *[tracing.fresh(tangent.meta["val"]) for tangent in tangents]])
        graph, twins = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in self.graph.nodes:
            twin = twins[node] = graph.node_copy(node, lambda source: twins[source])
            if node.op == "placeholder":
                twin.meta["val"] = next(given)
            elif node.op == "call_function":
                args, kwargs = fx.map_arg((twin.args, twin.kwargs), lambda source: source.meta["val"])
                twin.meta["val"] = twin.target(*args, **kwargs)  # type: ignore[operator]
        return TracedReplacement(graph, self.guards, _used=True)


@dataclass
class TraceCache:
    """The traces of one run; a ``str`` instead of a trace is the reason why there is none."""

    _patterns: dict[object, PatternExpr | str] = field(default_factory=dict)
    _replacements: dict[object, TracedReplacement | str] = field(default_factory=dict)
    _results: dict[object, list[Any] | str] = field(default_factory=dict)

    def precise_pattern(self, rule: PreparedRule, examples: Sequence[Any]) -> PatternExpr | str:
        """The pattern of the search function for inputs like ``examples``: numbers and dtypes count."""
        key = (rule.rule, _signature(examples))
        if key not in self._patterns:
            self._patterns[key] = _kept(_precise_pattern, rule, examples)
        return self._patterns[key]

    def search_results(self, rule: PreparedRule, examples: Sequence[Any]) -> list[Any] | str:
        """The search function's results for inputs like ``examples``, as fake tensors."""
        key = (rule.rule, _signature(examples))
        if key not in self._results:
            self._results[key] = _search_results(rule, examples)
        return self._results[key]

    def replacement(self, rule: PreparedRule, examples: Sequence[Any]) -> TracedReplacement | str:
        """The replacement for inputs like ``examples``."""
        key = (rule.rule, _signature(examples))
        if key not in self._replacements:
            self._replacements[key] = _kept(_replacement, rule, examples)
        found = self._replacements[key]
        return found if isinstance(found, str) else found.on(examples)


_T = TypeVar("_T")
_MOST_KEPT = 512
_KEPT: OrderedDict[object, Any] = OrderedDict()


def _kept(trace: Callable[[PreparedRule, Sequence[Any]], _T], rule: PreparedRule, examples: Sequence[Any]) -> _T:
    """``trace(rule, examples)``, from an earlier run if possible.

    It is not possible for a user's rule, whose functions may depend on anything, or with symbols, which belong to one
    compilation.
    """
    if rule.rule not in BUILT_IN or tracing.symbols_of(examples):
        return trace(rule, examples)
    key = (trace, rule.rule, _signature(examples))
    if key not in _KEPT:
        _KEPT[key] = trace(rule, examples)
        if len(_KEPT) > _MOST_KEPT:
            _KEPT.popitem(last=False)
    found: _T = _KEPT[key]
    return found


def forget() -> None:
    """Forget all traces, because operators were added or removed."""
    _KEPT.clear()


def _signature(examples: Sequence[Any]) -> tuple[object, ...]:
    """A value that is equal for inputs with the same trace; symbols of one graph differ by their expressions."""
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
    names = [*tracing.named_symbols(examples), *rule.flat_names]
    if tracing.matched_outputs(search.graph, len(names)) != rule.outputs:
        return "the search function gives other gradients for these inputs than for the example inputs"
    tracing.keep_outputs(search.graph, rule.outputs)
    return pattern_of(search.graph, names)


def _search_results(rule: PreparedRule, examples: Sequence[Any]) -> list[Any] | str:
    try:
        graph = tracing.trace(rule.rule.search, examples, rule.rule.trace_fn).graph
    except Exception as error:  # noqa: BLE001 - as above
        return f"the search function does not accept these inputs: {type(error).__name__}: {error}"
    return [leaf.meta["val"] if isinstance(leaf, fx.Node) else leaf for leaf in tracing.output_leaves(graph)]


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
    if rule.outputs and rule.outputs[-1] >= len(tracing.output_leaves(graph)):
        return "the replacement returns fewer results for these inputs than for the example inputs"
    tracing.keep_outputs(graph, rule.outputs)
    guards = environment.guards[before:] if environment is not None else ()
    return TracedReplacement(graph, tuple(str(guard.expr) for guard in guards))
