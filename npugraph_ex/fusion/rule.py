"""A fusion rule: what it looks for, what it puts there, and when that is right. Not how it is matched.

``FusionRule`` is the declaration, one small frozen object. ``prepare`` traces it once; the result holds no state of any
compile, so that many compiles may share it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._inductor.pattern_matcher import Match, PatternExpr, fwd_only
from torch.utils import _pytree as pytree

from npugraph_ex.errors import ReplacementError
from npugraph_ex.fusion import tracing
from npugraph_ex.fusion.pattern import outputs_of, pattern_of
from npugraph_ex.passes.aliases import written_by

Condition = Callable[[Match], str | None]


def always(match: Match) -> str | None:  # noqa: ARG001 - a condition takes the match
    """The condition of a rule that needs none."""
    return None


@dataclass(frozen=True, eq=False)
class FusionRule:
    """One declared rewrite.

    Attributes:
        name: appears in the report.
        search: the function whose traced operators are looked for. Its arguments are wildcards.
        replace: the function whose traced operators take their place; same arguments, same number of results.
        example_inputs: makes one example for each argument that is not in ``scalars``, under a fake mode.
        condition: None to allow a match, otherwise the reason why not.
        scalars: numbers that are wildcards too, with the value that stands for each while tracing. A value that no
            operator has as a default.
        trace_fn: as in ``torch._inductor.pattern_matcher``.
        pattern: used for matching in place of the traced ``search``.
        free_strides: results may have other strides than before where nobody can tell, see ``layout``.
        not_in_modes: the values of the option ``mode`` in which the rule does not apply.
    """

    name: str
    search: Callable[..., Any]
    replace: Callable[..., Any]
    example_inputs: Callable[[], Sequence[Any]]
    condition: Condition = always
    scalars: Mapping[str, float] = field(default_factory=dict)
    trace_fn: tracing.TraceFn = fwd_only
    pattern: PatternExpr | None = None
    free_strides: bool = False
    not_in_modes: tuple[str, ...] = ()


@dataclass(frozen=True)
class PreparedRule:
    """A rule ready to be matched against any number of graphs.

    Attributes:
        rule: the declaration.
        arguments: the search function's argument names.
        flat_arguments: for each argument, the names of its tensors and numbers: one, or several for a list.
        specs: for each argument, how its flat values are put together.
        tensors: the flat names that stand for tensors.
        with_gradient: those of them whose examples require a gradient.
        pattern: the loose pattern; None when the rule is inactive.
        inactive: why the rule cannot be used here, for example a missing operator.
        key: equal for two registrations of the same rewrite.
    """

    rule: FusionRule
    arguments: tuple[str, ...]
    flat_arguments: tuple[tuple[str, ...], ...]
    specs: tuple[Any, ...]
    tensors: frozenset[str]
    with_gradient: frozenset[str]
    pattern: PatternExpr | None
    inactive: str
    key: tuple[object, ...]

    @property
    def flat_names(self) -> list[str]:
        """The names of all wildcards, in order."""
        return [name for names in self.flat_arguments for name in names]

    def structured(self, bound: Mapping[str, Any]) -> list[Any]:
        """One value for each argument, from the flat values that a match bound."""
        return [
            pytree.tree_unflatten([bound[name] for name in names], spec)
            for names, spec in zip(self.flat_arguments, self.specs, strict=True)
        ]


def _parameter_names(rule: FusionRule) -> tuple[str, ...]:
    names = tuple(inspect.signature(rule.search).parameters)
    others = tuple(inspect.signature(rule.replace).parameters)
    if len(names) != len(others):
        raise ReplacementError(
            f"{rule.name}: the replacement must take the same arguments as the search function, "
            f"({', '.join(names)}); it takes ({', '.join(others)})."
        )
    unknown = set(rule.scalars) - set(names)
    if unknown:
        raise ReplacementError(
            f"{rule.name}: scalar_workaround names {sorted(unknown)}; "
            f"the search function's arguments are {list(names)}."
        )
    return names


def _examples(rule: FusionRule, names: Sequence[str]) -> list[Any]:
    """One example for each argument, scalars included, all fresh."""
    given = list(rule.example_inputs())
    expected = [name for name in names if name not in rule.scalars]
    if len(given) != len(expected):
        raise ReplacementError(
            f"{rule.name}: example_inputs must hold one value for each of {expected}; it holds {len(given)}."
        )
    examples = iter(given)
    values = [rule.scalars[name] if name in rule.scalars else next(examples) for name in names]
    return [pytree.tree_map(tracing.fresh, value) for value in values]


def _flat(names: Sequence[str], examples: Sequence[Any]) -> tuple[list[tuple[str, ...]], list[Any], set[str]]:
    flat_names: list[tuple[str, ...]] = []
    specs: list[Any] = []
    tensors: set[str] = set()
    for name, example in zip(names, examples, strict=True):
        leaves, spec = pytree.tree_flatten(example)
        own = (name,) if len(leaves) == 1 else tuple(f"{name}_{i}" for i in range(len(leaves)))
        flat_names.append(own)
        specs.append(spec)
        tensors.update(n for n, leaf in zip(own, leaves, strict=True) if isinstance(leaf, torch.Tensor))
    return flat_names, specs, tensors


def _refuse_writes(rule: FusionRule, gm: fx.GraphModule) -> None:
    for node in gm.graph.nodes:
        if written_by(node):
            raise ReplacementError(
                f"{rule.name}: the search function contains {node.target}, which writes {written_by(node)[0].name}. "
                "AOT graphs are functional, so it could never match; search for the functional form."
            )


def _refuse_unused(rule: FusionRule, gm: fx.GraphModule, names: Sequence[str]) -> None:
    placeholders = gm.graph.find_nodes(op="placeholder")
    for name, placeholder in zip(names, placeholders, strict=False):
        if not placeholder.users and name not in rule.scalars:
            raise ReplacementError(
                f"{rule.name}: the search function does not use its argument {name}, so a match could not bind it. "
                "Leave it out, or name it in scalar_workaround if it is a number."
            )


def _refuse_other_outputs(rule: FusionRule, pattern: PatternExpr, replacement: fx.GraphModule) -> None:
    wanted = len(outputs_of(pattern))
    output = next(iter(replacement.graph.find_nodes(op="output")))
    given = len(pytree.tree_leaves(output.args[0]))
    if wanted != given:
        raise ReplacementError(
            f"{rule.name}: the replacement must return as many results as the search function, {wanted}; "
            f"it returns {given}."
        )


def _identity_of(function: object) -> object:
    """Equal for two functions with the same code and the same captured values, as two models register them."""
    code = getattr(function, "__code__", None)
    if code is None:
        return function
    cells = tuple(id(cell.cell_contents) for cell in getattr(function, "__closure__", None) or ())
    return (code, cells, getattr(function, "__self__", None))


def prepare(rule: FusionRule, judge: object = None) -> PreparedRule:
    """Trace ``rule``; ``judge`` is the user's function behind the condition, for recognising duplicates.

    Raises:
        ReplacementError: the search function cannot be traced or cannot be a pattern, or the replacement does not
            fit it. A replacement that merely cannot be traced *here* makes the rule inactive instead.
    """
    names = _parameter_names(rule)
    with ExitStack() as stack:
        tracing.registration_mode(stack)
        examples = _examples(rule, names)
        flat_names, specs, tensors = _flat(names, examples)
        flat = [name for own in flat_names for name in own]
        try:
            search = tracing.trace(rule.search, examples, rule.trace_fn)
        except Exception as error:
            raise ReplacementError(
                f"{rule.name}: the search function {rule.search.__qualname__} cannot be traced on the example inputs: "
                f"{type(error).__name__}: {error}"
            ) from error
        _refuse_writes(rule, search)
        pattern = rule.pattern
        if pattern is None:
            _refuse_unused(rule, search, flat)
            scalars = {value: name for name, value in rule.scalars.items()}
            pattern = pattern_of(search.graph, flat, scalars, loose=True)
        if any(output is None for output in outputs_of(pattern)):
            raise ReplacementError(
                f"{rule.name}: search_fn_pattern has None among its outputs; every one needs a pattern."
            )
        inactive, replacement_text = "", ""
        try:
            replacement = tracing.trace(rule.replace, examples, rule.trace_fn)
        except Exception as error:  # noqa: BLE001 - the fused operator may not exist on this SoC or CANN
            inactive = f"its replacement cannot be traced: {type(error).__name__}: {error}"
        else:
            replacement_text = str(replacement.graph)
            _refuse_other_outputs(rule, pattern, replacement)
    key = (str(search.graph), replacement_text, _identity_of(judge), rule.pattern)
    leaves = zip(flat, pytree.tree_leaves(examples), strict=True)
    gradients = frozenset(name for name, leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad)
    return PreparedRule(
        rule, names, tuple(flat_names), tuple(specs), frozenset(tensors), gradients, pattern, inactive, key
    )  # fmt: skip
