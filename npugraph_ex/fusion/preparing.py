"""Prepares a declared rule for matching: traces it once, and rejects a rule that can never match or never be replaced."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx
from torch._inductor.pattern_matcher import joint_fwd_bwd
from torch._subclasses.fake_tensor import UnsupportedOperatorException
from torch.utils import _pytree as pytree

from npugraph_ex.errors import ReplacementError
from npugraph_ex.fusion import tracing
from npugraph_ex.fusion.pattern import outputs_of, pattern_of
from npugraph_ex.fusion.rule import FusionRule, PreparedRule
from npugraph_ex.graph.launches import count_kernels
from npugraph_ex.graph.memory.aliases import written_by
from npugraph_ex.graph.undeclared import was_found

_SEARCH_WITHOUT_WRITES = "AOT graphs are functional, so it could never match; search for the functional form."
_TWIN = (
    "Only ATen's operators have a functional form here, on a clone, too: give this one a twin that returns a new tensor, and "
    "call the twin."
)
_REPLACE_WITHOUT_WRITES = (
    "The graph's other readers of that memory would see the write, so it could never be used; compute a new tensor, by the "
    "functional form or in a clone."
)


def name_of(function: Callable[..., Any]) -> str:
    """The qualified name of a function, method, module or other callable."""
    home = function if hasattr(function, "__qualname__") else type(function)
    return f"{home.__module__}.{home.__qualname__}"


def _parameters(rule: FusionRule, what: str, function: Callable[..., Any]) -> tuple[str, ...]:
    """The argument names of a function, or of a module's ``forward``."""
    try:
        found = inspect.signature(getattr(function, "forward", function)).parameters
    except (TypeError, ValueError) as error:
        raise ReplacementError(
            f"{rule.name}: the arguments of the {what} function cannot be read ({error}). Wrap it in a function of yours."
        ) from error
    by_name = [name for name, one in found.items() if one.kind is one.KEYWORD_ONLY]
    if by_name:
        raise ReplacementError(
            f"{rule.name}: the {what} function takes {', '.join(by_name)} by keyword only. Its arguments must be positional: "
            "example_inputs has their values in order. Leave out the * before them."
        )
    return tuple(found)


def _parameter_names(rule: FusionRule) -> tuple[str, ...]:
    names = _parameters(rule, "search", rule.search)
    others = _parameters(rule, "replacement", rule.replace)
    if len(names) != len(others):
        raise ReplacementError(
            f"{rule.name}: the replacement must take the same arguments as the search function, "
            f"({', '.join(names)}); it takes ({', '.join(others)})."
        )
    if names != others and sorted(names) == sorted(others):
        raise ReplacementError(
            f"{rule.name}: the replacement has the search function's arguments in another order, ({', '.join(others)}) and not "
            f"({', '.join(names)}). A match passes them by position, so the order must be the same."
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
            f"{rule.name}: example_inputs must hold one value for each of {expected}; it holds {len(given)}. "
            "A function of its own, without the argument, is the rule for a form that lacks it."
        )
    examples = iter(given)
    values = [rule.scalars[name] if name in rule.scalars else next(examples) for name in names]
    fresh = partial(tracing.fresh, device=_device_of(values))
    return [pytree.tree_map(fresh, value) for value in values]


def _device_of(examples: Sequence[Any]) -> torch.device | None:
    """The NPU where all examples are on the CPU; None where they stay on their devices.

    A trace on the CPU has other operators than the graphs of models on the NPU, such as ``mm`` in place of ``matmul``.
    """
    kinds = {leaf.device.type for leaf in pytree.tree_leaves(list(examples)) if isinstance(leaf, torch.Tensor)}
    return torch.device("npu", 0) if kinds == {"cpu"} and hasattr(torch, "npu") else None


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


def _refuse_writes(rule: FusionRule, gm: fx.GraphModule, what: str, instead: str) -> None:
    for node in gm.graph.nodes:
        if written_by(node) and not was_found(node.target):  # AOT too treats that one as functional
            remedy = instead if getattr(node.target, "namespace", "") == "aten" else _TWIN
            raise ReplacementError(
                f"{rule.name}: the {what} contains {node.target}, which writes {written_by(node)[0].name}. {remedy}"
            )


def _refuse_unused(rule: FusionRule, gm: fx.GraphModule, names: Sequence[str]) -> None:
    placeholders = gm.graph.find_nodes(op="placeholder")
    for name, placeholder in zip(names, placeholders, strict=False):
        if not placeholder.users and name not in rule.scalars:
            raise ReplacementError(
                f"{rule.name}: the search function does not use its argument {name}, so a match could not bind it. "
                "Leave it out, or name it in scalar_workaround if it is a number. A model with and without it has two forms: "
                "register a rule for each."
            )


def _refuse_surroundings(rule: FusionRule, replacement: fx.GraphModule) -> None:
    """A match traces the replacement again, under the fake mode of its graph, which knows no tensor from elsewhere."""
    if replacement.graph.find_nodes(op="get_attr"):
        raise ReplacementError(
            f"{rule.name}: the replacement reads a tensor from its surroundings. Make the constant inside the function, for "
            "example by torch.full, or pass the tensor as an argument."
        )


def _refuse_other_outputs(rule: FusionRule, wanted: int, replacement: fx.GraphModule, *, training: bool) -> None:
    given = len(tracing.output_leaves(replacement.graph))
    if wanted != given:
        gradients = ", the gradients of the arguments included" if training else ""
        raise ReplacementError(
            f"{rule.name}: the replacement must return as many results as the search function, {wanted}; "
            f"it returns {given}{gradients}."
        )


def _traced_search(rule: FusionRule, names: Sequence[str], examples: Sequence[Any]) -> fx.GraphModule:
    try:
        return tracing.trace(rule.search, examples, rule.trace_fn)
    except Exception as error:
        leaves = zip(names, pytree.tree_leaves(list(examples), is_leaf=lambda leaf: leaf is None), strict=False)
        given = ", ".join(f"{name} = {_shown(leaf)}" for name, leaf in leaves)
        hint = " It reads a tensor's values, which tracing does not know." if "DataDependent" in repr(error) else ""
        if rule.trace_fn is joint_fwd_bwd and not any(
            isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves(list(examples))
        ):
            hint = " joint_fwd_bwd traces a backward too: make those examples with requires_grad=True whose gradient is needed."
        said = f"{error}".strip().removesuffix(".")
        raise ReplacementError(
            f"{rule.name}: the search function cannot be traced on the example inputs, {given}: "
            f"{type(error).__name__}{f': {said}' if said else ''}.{hint}"
        ) from error


def _refuse_numbers_twice(
    rule: FusionRule, search: fx.GraphModule, names: Sequence[str], examples: Sequence[Any], outputs: Sequence[int]
) -> None:
    """Raise if the search function has a number of its own that is the stand-in of an argument: each would match as the other."""
    for name, number in rule.scalars.items():
        if not isinstance(number, float) or _count(search, number) < 2:  # the argument's place alone
            continue
        changed = [number * 1.25 + 0.0625 if one == name else value for one, value in zip(names, examples, strict=True)]
        try:
            again = tracing.trace(rule.search, changed, rule.trace_fn)
        except Exception:  # noqa: BLE001, S112 - there may be no dimension of another number
            continue
        tracing.keep_outputs(again.graph, outputs)
        if _count(again, number):
            raise ReplacementError(
                f"{rule.name}: scalar_workaround has {name} = {number!r}, and the search function has the number {number!r} in "
                "another place, too: a match could not tell them apart. Give the argument another number."
            )


def _count(traced: fx.GraphModule, number: float) -> int:
    """In how many places of the calls a number stands."""
    calls = (node for node in traced.graph.nodes if node.op == "call_function")
    places = (leaf for node in calls for leaf in pytree.tree_leaves((node.args, dict(node.kwargs))))
    return sum(isinstance(leaf, (int, float)) and leaf == number for leaf in places)


def _shown(value: object) -> str:
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)


@dataclass(frozen=True, eq=False)
class _Same:
    """Equal only for the same object. It keeps the object alive, so that no other object gets the same id."""

    value: object

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def _identity_of(function: object) -> object:
    """A value that is equal for two functions with the same code, captured values and defaults, which two models may register."""
    code = getattr(function, "__code__", None)
    if code is None:
        return function
    cells = tuple(_Same(cell.cell_contents) for cell in getattr(function, "__closure__", None) or ())
    defaults = getattr(function, "__defaults__", None) or (), (getattr(function, "__kwdefaults__", None) or {}).items()
    kept = tuple(map(_Same, defaults[0])), tuple((name, _Same(value)) for name, value in defaults[1])
    return (code, cells, kept, getattr(function, "__self__", None))


def prepare(rule: FusionRule, judge: object = None) -> PreparedRule:
    """Trace ``rule``; ``judge`` is the user's function in the condition, by which duplicates are recognised.

    Raises:
        ReplacementError: the search function cannot be traced or cannot be a pattern, or the replacement does not
            fit it. A replacement that cannot be traced *here*, for example without an operator, makes the rule inactive
            instead.
    """
    names = _parameter_names(rule)
    with ExitStack() as stack:
        tracing.registration_mode(stack)
        examples = _examples(rule, names)
        flat_names, specs, tensors = _flat(names, examples)
        flat = [name for own in flat_names for name in own]
        search = _traced_search(rule, flat, examples)
        _refuse_writes(rule, search, "search function", _SEARCH_WITHOUT_WRITES)
        training = len(search.graph.find_nodes(op="placeholder")) > len(flat)
        results = len(tracing.output_leaves(search.graph))
        outputs = tracing.matched_outputs(search.graph, len(flat))
        tracing.keep_outputs(search.graph, outputs)
        pattern = rule.pattern
        if pattern is not None:
            results = len(outputs_of(pattern))
            outputs = tuple(range(results))
        else:
            _refuse_unused(rule, search, flat)
            scalars = {value: name for name, value in rule.scalars.items()}
            if len(scalars) < len(rule.scalars):
                raise ReplacementError(
                    f"{rule.name}: numbers of scalar_workaround have the same value, by which a match could not tell them apart; "
                    f"give each its own: {dict(rule.scalars)}."
                )
            _refuse_numbers_twice(rule, search, names, examples, outputs)
            try:
                pattern = pattern_of(search.graph, flat, scalars, loose=True)
            except ReplacementError as error:
                raise ReplacementError(f"{rule.name}: {error}") from error
        if any(output is None for output in outputs_of(pattern)):
            raise ReplacementError(
                f"{rule.name}: search_fn_pattern has None among its outputs; every one needs a pattern."
            )
        inactive, replacement_text, saves = "", "", 0
        try:
            replacement = tracing.trace(rule.replace, examples, rule.trace_fn)
        except Exception as error:  # noqa: BLE001 - the fused operator may not exist on this SoC or CANN
            inactive = f"its replacement cannot be traced: {_why_untraced(error)}"
        else:
            replacement_text = str(replacement.graph)
            saves = count_kernels(search.graph) - count_kernels(replacement.graph)
            _refuse_writes(rule, replacement, "replacement", _REPLACE_WITHOUT_WRITES)
            _refuse_surroundings(rule, replacement)
            _refuse_other_outputs(rule, results, replacement, training=training)
    key = (str(search.graph), replacement_text, _identity_of(judge), rule.pattern)
    leaves = zip(flat, pytree.tree_leaves(examples), strict=True)
    gradients = frozenset(name for name, leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad)
    return PreparedRule(
        rule, names, tuple(flat_names), tuple(specs), frozenset(tensors), gradients, training, outputs, pattern, inactive,
        key, saves, changes_nothing=str(search.graph) == replacement_text and not search.graph.find_nodes(op="get_attr"),
    )  # fmt: skip


def _why_untraced(error: Exception) -> str:
    if isinstance(error, UnsupportedOperatorException):
        name = error.func.name()
        return (
            f"{name} has no fake function, which says the shape and dtype of its results; "
            f'add @torch.library.register_fake("{name}")'
        )
    return f"{type(error).__name__}: {error}"


def unusable(rule: FusionRule, reason: str) -> PreparedRule:
    """A rule that cannot be prepared, for the report."""
    return PreparedRule(
        rule,
        (),
        (),
        (),
        frozenset(),
        frozenset(),
        training=False,
        outputs=(),
        pattern=None,
        inactive=reason,
        key=(rule,),
    )
