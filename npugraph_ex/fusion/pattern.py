"""Turns a traced search function into a pattern of torch's matcher, stricter where torch's is loose.

torch's ``CallFunction`` compares the arguments as the traced graph writes them: it ignores keywords that the pattern does not
name, and it fails if only one side writes a default. ``SchemaCall`` compares what each side *effectively* passes for every
argument of the schema.

torch's ``MultiOutputPattern`` keeps the first call that fits an output, also where a later output then fits nowhere.
``SeveralOutputs`` goes back and tries the next call.

User counts are not part of a pattern; ``checks`` judges other users of a matched value, with a reason.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
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
from torch._ops import OpOverload
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils import _pytree as pytree

from npugraph_ex import _torch_private
from npugraph_ex.errors import ReplacementError
from npugraph_ex.fusion.arguments import argument_names, effective_arguments
from npugraph_ex.fusion.mismatch_messages import Mismatch

_MOST_CHOICES = 256
"""How many calls are tried for the outputs of one pattern at one place. Usually it is one for each output."""
_SHAPE_LIKE = (int, float, torch.SymInt, torch.device, torch.dtype)


_COMMUTATIVE: Mapping[OpOverload, tuple[Any, ...]] = {
    torch.ops.aten.add.Tensor: (1,),
    torch.ops.aten.mul.Tensor: (),
    torch.ops.aten.maximum.default: (),
    torch.ops.aten.minimum.default: (),
}
"""Operators whose first two operands may change places, with the values of the other arguments that this needs."""


class EitherOrder(MatchContext):
    """Tries the operands of sums and products in both orders; ``exchanged`` are the nodes that match in the other one only.

    For explanations. A rule is applied to one order, because the replacement is traced with the pattern's.
    """

    def __init__(self, pattern: PatternExpr, graph: fx.Graph) -> None:
        super().__init__(outputs_of(pattern), graph=graph)
        self.exchanged: list[fx.Node] = []


class SchemaCall(CallFunction):
    """Matches a call of one overload whose effective arguments all match.

    Args:
        overload: the operator.
        values: for each schema argument, in order, a pattern, a constant, or a tuple of these.
    """

    def __init__(self, overload: OpOverload, values: Sequence[Any]) -> None:
        super().__init__(overload, *values, _users=MULTIPLE)
        self.overload = overload

    def _match(self, node: fx.Node, ctx: MatchContext) -> Match | FailedMatch:
        if not self._match_fns(node):
            return FailedMatch("{} is not a call of {}", node, self.overload)
        values = effective_arguments(node)
        if isinstance(ctx, EitherOrder) and _COMMUTATIVE.get(self.overload) == values[2:]:
            before, count = dict(ctx.pattern_to_node), len(ctx.exchanged)
            found = self._match_values(node, values, ctx)
            if is_match(found):
                return found
            ctx.pattern_to_node = before
            ctx.exchanged[count:] = [node]
            values = (values[1], values[0], *values[2:])
        return self._match_values(node, values, ctx)

    def _match_values(self, node: fx.Node, values: Sequence[Any], ctx: MatchContext) -> Match | FailedMatch:
        match = Match(ctx, self)
        arguments = zip(argument_names(self.overload), self.args, values, strict=True)
        for position, (name, pattern, value) in enumerate(arguments):
            failed = _match_value(pattern, value, ctx, match)
            if failed is None and _promotes_otherwise(pattern, value, node, position):
                failed = FailedMatch("differs")
            if failed is not None and failed.format_string == "differs":
                text = "{} ({}): {} is {}, the pattern has {}"
                # A report uses the position to say how far the match went.
                return FailedMatch(text, node, self.overload, name, value, pattern, position=position)
            if failed is not None:
                return failed
        match.nodes.append(node)
        match.targets[self] = node.target
        return match


class OutputOf(CallFunction):
    """Matches one output of a multi-output call, ``getitem(source, index)``.

    As torch's class, but a failure names the output that it found.
    """

    def __init__(self, source: PatternExpr, index: int) -> None:
        super().__init__(operator.getitem, source, index, _users=MULTIPLE)
        self.source = source
        self.index = index

    def _match(self, node: fx.Node, ctx: MatchContext) -> Match | FailedMatch:
        if not self._match_fns(node):
            return FailedMatch("{} is not an output of an operator", node)
        match = Match(ctx, self)
        found, index = node.args
        child = ctx.match(self.source, found)
        if not is_match(child):
            return child
        if index != self.index:
            return FailedMatch("{} is output {} of {}, the pattern has output {}", node, index, found, self.index)
        match.extend(child)
        match.nodes.append(node)
        match.targets[self] = node.target
        return match


class SeveralOutputs(MultiOutputPattern):
    """Matches a pattern of several outputs, from the first one on.

    Of the products ``x * t`` and ``g * t`` of a gate and its gradient, the first is also one of some value and ``t``. So a call
    that another part of the pattern has is tried last, and a choice is taken back where a later output fits nowhere.
    """

    def _match(self, node: fx.Node, ctx: MatchContext) -> Match | FailedMatch:
        found = ctx.match(self.outputs[0], node)  # type: ignore[arg-type]  # the first is always a call
        if not is_match(found):
            return found
        others = self._match_from(1, ctx, iter(range(_MOST_CHOICES)))
        if isinstance(others, FailedMatch):
            return others
        for other in others:
            found.extend(other)
        return found

    def _match_from(self, position: int, ctx: MatchContext, choices: Iterator[int]) -> list[Match] | FailedMatch:
        """The matches of the outputs from ``position`` on; each choice is one of ``choices``, after which there are no more."""
        if position == len(self.outputs):
            return []
        pattern = self.outputs[position]
        if pattern is None:
            return self._match_from(position + 1, ctx, choices)
        failed, before = FailedMatch("no anchor found"), dict(ctx.pattern_to_node)
        taken = {node for node in before.values() if isinstance(node, fx.Node)}
        searched: Any = set()
        for node in sorted(pattern.find_anchor_nodes(ctx, searched), key=taken.__contains__):
            if next(choices, None) is None:
                break
            match = ctx.match(pattern, node)
            others = self._match_from(position + 1, ctx, choices) if isinstance(match, Match) else match
            if isinstance(match, Match) and not isinstance(others, FailedMatch):
                return [match, *others]
            assert isinstance(others, FailedMatch)  # noqa: S101 - a match has others, or they failed
            failed, ctx.pattern_to_node = others, dict(before)
        return failed


def _match_value(pattern: Any, value: Any, ctx: MatchContext, match: Match) -> FailedMatch | None:
    """Match one argument and add its bindings to ``match``. None if it matched."""
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
    return None if same_constant(pattern, value) else FailedMatch("differs")


def same_constant(pattern: Any, value: Any) -> bool:
    """Whether two constants are equal; symbols must be equal for all their values."""
    if isinstance(pattern, torch.SymInt) or isinstance(value, torch.SymInt):
        numbers = isinstance(value, (int, torch.SymInt)) and isinstance(pattern, (int, torch.SymInt))
        return numbers and statically_known_true(value == pattern)
    if isinstance(value, float) and isinstance(pattern, float) and math.isnan(value) and math.isnan(pattern):
        return True
    if isinstance(value, fx.Node) or type(value) not in (type(pattern), int, float, bool) or value != pattern:
        return False
    return value != 0 or _is_below_zero(value) == _is_below_zero(pattern)


def _is_below_zero(number: Any) -> bool:
    """Whether a number is negative, -0.0 included: a division by it, or a sign copied from it, is that of a negative number."""
    return isinstance(number, float) and math.copysign(1.0, number) < 0


def _promotes_otherwise(pattern: Any, value: Any, node: fx.Node, position: int) -> bool:
    """Whether equal numbers, such as 2 and 2.0, give results of different dtypes, as they do with integers and bools."""
    if type(value) is type(pattern) or not {type(value), type(pattern)} <= {bool, int, float}:
        return False
    kind = _torch_private.schema(node.target).arguments[position].type  # type: ignore[arg-type]
    kind = kind.getElementType() if isinstance(kind, torch.OptionalType) else kind
    if not isinstance(kind, (torch.NumberType, torch.TensorType)):
        return False
    values = [source.meta.get("val") for source in node.all_input_nodes]
    return not any(isinstance(v, torch.Tensor) and (v.is_floating_point() or v.is_complex()) for v in values)


class _PatternBuilder:
    """Builds the patterns of a traced graph's nodes."""

    def __init__(self, names: Sequence[str], scalars: Mapping[float, str], *, loose: bool) -> None:
        self._names = iter(names)
        self._scalars = scalars
        self._met: set[float] = set()
        self._loose = loose
        self._known: dict[fx.Node, PatternExpr] = {}

    def value(self, value: Any) -> Any:
        """The pattern of an argument."""
        if isinstance(value, fx.Node):
            return self._known[value]
        if isinstance(value, (list, tuple)):
            items = tuple(self.value(item) for item in value)
            return Ignored() if self._loose and items and all(isinstance(item, Ignored) for item in items) else items
        if type(value) in (int, float, bool) and value in self._scalars and (name := self._scalar(value)):
            self._met.add(value)
            return KeywordArg(name)
        return Ignored() if self._loose and type(value) in _SHAPE_LIKE else value

    def _scalar(self, value: float) -> str:
        """The argument that a number stands for; empty where one of them is a truth value: True equals 1."""
        return next(
            (n for v, n in self._scalars.items() if v == value and isinstance(v, bool) == isinstance(value, bool)), ""
        )

    def add(self, node: fx.Node) -> None:
        """Add the next node of the graph, except its output."""
        if node.op == "placeholder":
            self._known[node] = KeywordArg(next(self._names, node.name))
        elif node.op != "call_function":
            raise ReplacementError(
                f"the search function reads {node.target!r} from its surroundings ({node.op}); a pattern can only "
                "contain operators. Pass tensors as arguments instead."
            )
        elif node.target is operator.getitem:
            source, index = node.args
            self._known[node] = OutputOf(self.value(source), index)  # type: ignore[arg-type]
        elif isinstance(node.target, OpOverload):
            self._known[node] = SchemaCall(node.target, [self.value(value) for value in effective_arguments(node)])
        else:
            self._known[node] = CallFunction(node.target, *map(self.value, node.args), _users=MULTIPLE)

    def result(self, returned: Any) -> PatternExpr:
        """The whole pattern, from the graph's results."""
        for value in self._scalars.keys() - self._met:
            raise ReplacementError(
                f"no operator of the search function takes its number {self._scalars[value]} ({value} in the trace), so a match "
                "could not bind it. Leave it out, or give the number that Python computes from it an argument of its own; torch "
                "may trace a negative dimension as the one that it stands for: give that one."
            )
        outputs = pytree.tree_map(lambda leaf: self._known.get(leaf) if isinstance(leaf, fx.Node) else None, returned)
        return _with_outputs(outputs)


def pattern_of(
    graph: fx.Graph, names: Sequence[str], scalars: Mapping[float, str] | None = None, *, loose: bool = False
) -> PatternExpr:
    """The pattern of a traced search function.

    Args:
        graph: placeholders are the wildcards.
        names: their names in a match, in order; further placeholders keep their own names.
        scalars: constants that are wildcards too, and the names that the match gives them.
        loose: ignore numbers, dtypes and devices, which a trace copies from the example inputs. A loose match must be checked
            again with a pattern traced on the actual inputs.
    """
    converter = _PatternBuilder(names, scalars or {}, loose=loose)
    for node in graph.nodes:
        if node.op == "output":
            return converter.result(node.args[0])
        converter.add(node)
    raise ReplacementError("the search function's graph has no output")


def _with_outputs(result: Any) -> PatternExpr:
    outputs = [result] if isinstance(result, PatternExpr) else pytree.tree_leaves(result, is_leaf=lambda x: x is None)
    for position, output in enumerate(outputs):
        if not isinstance(output, CallFunction):
            what = f"its argument {output.name}" if isinstance(output, KeywordArg) else "a constant"
            raise ReplacementError(
                f"output {position} of the search function is {what}; it must be the result of an operator. "
                "Leave it out of the search and of the replacement."
            )
    return outputs[0] if isinstance(result, PatternExpr) else SeveralOutputs(outputs)


def outputs_of(pattern: PatternExpr) -> list[PatternExpr | None]:
    """The output patterns; matching starts at the first."""
    return list(pattern.outputs) if isinstance(pattern, MultiOutputPattern) else [pattern]


def getitem_source(pattern: PatternExpr | None) -> tuple[OpOverload, int] | None:
    """``(overload, index)`` if the pattern is one output of a multi-output operator."""
    if not isinstance(pattern, OutputOf) or not isinstance(pattern.source, SchemaCall):
        return None
    return pattern.source.overload, pattern.index


def match_at(pattern: PatternExpr, node: fx.Node) -> tuple[Match | FailedMatch, Mapping[PatternExpr, fx.Node | None]]:
    """Match ``pattern`` at ``node``; return the result, and the node of each part of the pattern that matched until then."""
    ctx = MatchContext(outputs_of(pattern), graph=node.graph)
    try:
        result = ctx.match(pattern, node)
    except FailedMatch as failed:
        result = failed
    if not is_match(result):
        result = Mismatch(result, outputs_of(pattern), ctx.pattern_to_node)
    return result, ctx.pattern_to_node
