"""Turns a traced search function into a pattern of torch's matcher, stricter where torch's is loose.

torch's ``CallFunction`` compares the arguments that happen to be written in the traced graph: it ignores keywords that
the pattern does not name, and fails when one side omits a default that the other writes. ``SchemaCall`` compares what
each side *effectively* passes for every argument of the schema. It is the one class here that overrides a method of
torch's pattern classes.

User counts are not part of a pattern: who else uses a matched value is decided in ``checks``, with a reason.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._inductor.pattern_matcher import (
    MULTIPLE,
    CallFunction,
    FailedMatch,
    Ignored,
    KeywordArg,
    Match,
    MatchContext,
    MultiOutputPattern,
    PatternExpr,
    is_match,
)
from torch.utils import _pytree as pytree

from npugraph_ex.errors import ReplacementError
from npugraph_ex.fusion.arguments import argument_names, effective_arguments

_SHAPE_LIKE = (int, float, torch.device, torch.dtype)


class SchemaCall(CallFunction):
    """Matches a call of one overload whose effective arguments all match.

    Args:
        overload: the operator.
        values: for each schema argument, in order, a pattern, a constant, or a tuple of these.
    """

    def __init__(self, overload: torch._ops.OpOverload, values: Sequence[Any]) -> None:
        super().__init__(overload, *values, _users=MULTIPLE)
        self.overload = overload

    def _match(self, node: fx.Node, ctx: MatchContext) -> Match | FailedMatch:
        if not self._match_fns(node):
            return FailedMatch("{} is not a call of {}", node, self.overload)
        match = Match(ctx, self)
        names = argument_names(self.overload)
        for name, pattern, value in zip(names, self.args, effective_arguments(node), strict=True):
            failed = _match_value(pattern, value, ctx, match)
            if failed is not None:
                return _explained(failed, node, name, value, pattern)
        match.nodes.append(node)
        match.targets[self] = node.target
        return match


def _match_value(pattern: Any, value: Any, ctx: MatchContext, match: Match) -> FailedMatch | None:
    """Match one argument; what it binds is added to ``match``. None when it matched."""
    if isinstance(pattern, PatternExpr):
        child = ctx.match(pattern, value)
        if not is_match(child):
            return child
        match.extend(child)
        return None
    if isinstance(pattern, tuple):
        if not isinstance(value, (list, tuple)) or len(value) != len(pattern):
            return FailedMatch("differs")
        failures = (_match_value(p, v, ctx, match) for p, v in zip(pattern, value, strict=True))
        return next((failed for failed in failures if failed is not None), None)
    same = not isinstance(value, fx.Node) and type(value) in (type(pattern), int, float, bool) and value == pattern
    return None if same else FailedMatch("differs")


def _explained(failed: FailedMatch, node: fx.Node, name: str, value: Any, pattern: Any) -> FailedMatch:
    """``failed``, saying which argument it was when it was a constant."""
    if failed.format_string != "differs":
        return failed
    return FailedMatch("{}: {} is {}, the pattern has {}", node, name, value, pattern)


def pattern_of(
    graph: fx.Graph, names: Sequence[str], scalars: Mapping[float, str] | None = None, *, loose: bool = False
) -> PatternExpr:
    """The pattern of a traced search function.

    Args:
        graph: placeholders are the wildcards.
        names: what the match calls them, in order; further placeholders keep their own names.
        scalars: constants that are wildcards too, and the names that the match gives them.
        loose: ignore numbers, dtypes and devices, which tracing burns in from the example inputs. A loose match must
            be checked again with a pattern traced on the actual inputs.
    """
    scalars = scalars or {}
    known: dict[fx.Node, PatternExpr] = {}
    inputs = iter(names)
    result: Any = None

    def converted(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return known[value]
        if isinstance(value, (list, tuple)):
            items = tuple(converted(item) for item in value)
            return Ignored() if loose and items and all(isinstance(item, Ignored) for item in items) else items
        if type(value) in (int, float) and value in scalars:
            return KeywordArg(scalars[value])
        return Ignored() if loose and type(value) in _SHAPE_LIKE else value

    for node in graph.nodes:
        if node.op == "placeholder":
            known[node] = KeywordArg(next(inputs, node.name))
        elif node.op == "output":
            result = pytree.tree_map(lambda leaf: known[leaf] if isinstance(leaf, fx.Node) else None, node.args[0])
        elif node.op != "call_function":
            raise ReplacementError(
                f"the search function reads {node.target!r} from its surroundings ({node.op}); a pattern can only "
                "contain operators. Pass tensors as arguments instead."
            )
        elif isinstance(node.target, torch._ops.OpOverload):
            known[node] = SchemaCall(node.target, [converted(value) for value in effective_arguments(node)])
        else:
            literal = node.target is operator.getitem
            args = [known[a] if isinstance(a, fx.Node) else a if literal else converted(a) for a in node.args]
            known[node] = CallFunction(node.target, *args, _users=MULTIPLE)
    return _with_outputs(result)


def _with_outputs(result: Any) -> PatternExpr:
    outputs = [result] if isinstance(result, PatternExpr) else pytree.tree_leaves(result, is_leaf=lambda x: x is None)
    for position, output in enumerate(outputs):
        if not isinstance(output, CallFunction):
            what = f"its argument {output.name}" if isinstance(output, KeywordArg) else "a constant"
            raise ReplacementError(
                f"output {position} of the search function is {what}; it must be the result of an operator. "
                "Leave it out of the search and of the replacement."
            )
    return outputs[0] if isinstance(result, PatternExpr) else MultiOutputPattern(outputs)


def outputs_of(pattern: PatternExpr) -> list[PatternExpr | None]:
    """The output patterns, of which the first is where matching starts."""
    return list(pattern.outputs) if isinstance(pattern, MultiOutputPattern) else [pattern]


def getitem_source(pattern: PatternExpr | None) -> tuple[torch._ops.OpOverload, int] | None:
    """``(overload, index)`` when the pattern is one output of a multi-output operator."""
    if not isinstance(pattern, CallFunction) or pattern.fns[0] is not operator.getitem or len(pattern.args) != 2:
        return None
    source, index = pattern.args
    return (source.overload, index) if isinstance(source, SchemaCall) and isinstance(index, int) else None


def match_at(pattern: PatternExpr, node: fx.Node) -> tuple[Match | FailedMatch, list[fx.Node]]:
    """Match ``pattern`` at ``node``; also which operator calls had matched when it failed or succeeded."""
    ctx = MatchContext(outputs_of(pattern), graph=node.graph)
    try:
        result = ctx.match(pattern, node)
    except FailedMatch as failed:
        result = failed
    reached = [
        bound
        for part, bound in ctx.pattern_to_node.items()
        if isinstance(part, SchemaCall) and isinstance(bound, fx.Node)
    ]
    return result, reached
