"""Faults of the matcher and of the checks around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from npugraph_ex.errors import ReplacementError
from npugraph_ex.testing.mutation import Mutant
from npugraph_ex_conformance.mutants._patches import answering

_CHECKS = "npugraph_ex.fusion.checks"


def _constants_match(original: Callable[..., Any]) -> Callable[..., Any]:
    def matches(pattern: Any, value: Any, ctx: Any, match: Any) -> Any:
        failed = original(pattern, value, ctx, match)
        return None if failed is not None and failed.format_string == "differs" else failed

    return matches


def _any_dtype(original: Callable[..., Any]) -> Callable[..., Any]:
    def condition(self: Any, match: Any) -> Any:
        reason = original(self, match)
        return None if reason is not None and "float32" in reason else reason

    return condition


def _outputs_shifted(original: Callable[..., Any]) -> Callable[..., Any]:
    """The results of a replacement, each in the place of its neighbour."""

    def outputs(graph: fx.Graph) -> list[object]:
        found = original(graph)
        return [*found[1:], *found[:1]]

    return outputs


def _before_the_first(original: Callable[..., Any]) -> Callable[..., Any]:
    """The replacement stands where the match began, before what it reads."""

    def find_placement(site: Any) -> Any:
        found = original(site)
        return (
            found if isinstance(found, str) else type(found)(site.nodes[0].graph.find_nodes(op="placeholder")[0].next)
        )

    return find_placement


def _duplicates_raise(original: Callable[..., Any]) -> Callable[..., Any]:
    """The second registration of a rule is an error."""

    def add(self: Any, prepared: Any) -> Any:
        if any(known.key == prepared.key for known in self.snapshot()):
            raise ReplacementError(f"{prepared.rule.name} is registered already")
        return original(self, prepared)

    return add


def _missing_operators_raise(original: Callable[..., Any]) -> Callable[..., Any]:
    """A replacement that cannot be traced ends the program."""

    def prepare(*args: Any, **kwargs: Any) -> Any:
        prepared = original(*args, **kwargs)
        if prepared.inactive:
            raise ReplacementError(prepared.inactive)
        return prepared

    return prepare


def _numbers_are_numbers(original: Callable[..., Any]) -> Callable[..., Any]:
    """Any number is as good as another."""
    numbers = (bool, int, float)

    def same(pattern: Any, value: Any) -> bool:
        return bool(original(pattern, value)) or {type(pattern), type(value)} <= set(numbers)

    return same


MUTANTS = (
    Mutant(
        "matcher-ignores-constants", "an argument that the pattern does not name must have its default value",
        "npugraph_ex.fusion.pattern:_match_value", _constants_match, "near-miss",
    ),
    Mutant(
        "matcher-takes-twins", "equal numbers of different types do not match each other",
        "npugraph_ex.fusion.pattern:_promotes_otherwise", answering(answer=False), "literals",
    ),
    Mutant(
        "matcher-takes-any-number", "a number of the pattern matches only the same number",
        "npugraph_ex.fusion.pattern:same_constant", _numbers_are_numbers, "near-miss muls_add",
    ),
    Mutant(
        "fusion-ignores-other-users", "a value that fusion removes has no user outside the match",
        f"{_CHECKS}:vanishing_values", answering(None), "near-miss",
    ),
    Mutant(
        "fusion-ignores-writes-between", "nothing writes a matched value between the matched operators",
        f"{_CHECKS}:undisturbed", answering(None), "near-miss",
    ),
    Mutant(
        "fusion-ignores-streams", "operators on different streams are not fused",
        f"{_CHECKS}:one_scope", answering(None), "near-miss",
    ),
    Mutant(
        "fusion-closes-cycles", "a fused operator does not need its own result",
        f"{_CHECKS}:_following", answering({}), "near-miss",
    ),
    Mutant(
        "fusion-ignores-dtypes", "an operator that does not take float32 is not given it",
        "npugraph_ex.fusion.rules._norm_operands:NormOperands.__call__", _any_dtype, "near-miss",
    ),
    Mutant(
        "fusion-ignores-metadata", "every replaced result keeps shape, dtype and strides",
        f"{_CHECKS}:same_metadata", answering(None), "planted",
    ),
    Mutant(
        "fusion-copies-views", "a matched view of an input stays, whoever uses it",
        f"{_CHECKS}:_views_of_inputs", answering(set()), "user rules",
    ),
    Mutant(
        "fusion-ignores-sharing", "every replaced result shares memory with what it shared it with",
        f"{_CHECKS}:same_aliasing", answering(None), "user rules",
    ),
    Mutant(
        "matcher-ignores-signs", "a zero of the pattern matches only a zero of the same sign",
        "npugraph_ex.fusion.pattern:_is_below_zero", answering(answer=False), "literals",
    ),
    Mutant(
        "fusion-draws-out-of-order", "who draws random numbers gets the same ones as before",
        f"{_CHECKS}:draws_in_order", answering(None), "user rules",
    ),
    Mutant(
        "fusion-begins-elsewhere", "a result begins where it began in its memory",
        f"{_CHECKS}:_begins_alike", answering(answer=True), "user rules",
    ),
    Mutant(
        "fusion-never-matches", "a pattern that must fuse does fuse",
        "npugraph_ex.fusion.engine:may_match", answering(answer=False), "planted",
    ),
    Mutant(
        "fusion-shifts-results", "each result replaces the result that it equals",
        "npugraph_ex.fusion.splice:output_nodes", _outputs_shifted, "planted",
    ),
    Mutant(
        "fusion-inserts-too-early", "a replacement stands after everything that it reads",
        f"{_CHECKS}:find_placement", _before_the_first, "planted",
    ),
    Mutant(
        "fusion-hides-outputs", "an output that nobody uses does not keep a pattern from matching",
        "npugraph_ex.fusion.candidates:_item", answering(None), "planted",
    ),
    Mutant(
        "registration-refuses-duplicates", "every model may register its rules",
        "npugraph_ex.fusion.registry:RuleRegistry.add", _duplicates_raise, "user rules",
    ),
    Mutant(
        "registration-needs-every-operator", "a missing fused operator disables only its own rule",
        "npugraph_ex.fusion.registry:prepare", _missing_operators_raise, "user rules",
    ),
    Mutant(
        "judge-compares-roundings-alone", "a number that is one step off is found, though its dtype has few digits",
        "npugraph_ex.testing.oracle.verdict:_GraphsInFloat64.judged", answering(None), "user rules",
    ),
)  # fmt: skip
