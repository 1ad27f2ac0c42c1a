"""The kinds of inputs that programs have in turn, and which of them a rule has: what torch leaves undefined is not tried."""

from __future__ import annotations

import operator
from typing import Literal

import torch
from torch import fx

from npugraph_ex import _torch_private
from npugraph_ex.testing.generator.choices import Choices
from npugraph_ex.testing.generator.magnitudes import corner_values, few_values, flat_rows, growing_values, large_values
from npugraph_ex.testing.generator.numbers import near_numbers
from npugraph_ex.testing.generator.patterns import Pattern
from npugraph_ex.testing.generator.program import Program
from npugraph_ex.testing.validation.integers import nodes_of

Kind = Literal["near", "few", "large", "plain", "growing", "rows"]
KINDS: tuple[Kind, ...] = ("near", "few", "large", "growing", "near", "plain")
"""Near the numbers of the pattern, few distinct values, large ones, larger ones at the end, and of several magnitudes.

The pattern alone has also rows of zeros and of one number.

Integers that grow are any, and corners where all inputs are integers."""
KINDS_OF_OTHER_DTYPES: tuple[Kind, ...] = ("large", "few")
_UNORDERED = frozenset({"argsort", "mode", "unique"})
"""Operators of which torch does not say which of several equal elements comes first, and which a device may order otherwise."""
_UNORDERED_PLACES = frozenset({"topk", "sort", "kthvalue", "median", "nanmedian"})
"""Those of which it does not say so, and whose first result has the values, which are the same in any order."""


def kind_of(turn: int, among: int, kinds: tuple[Kind, ...]) -> Kind:
    """The kind of inputs of one program; a setting that comes again, after ``among`` others, has the next kind."""
    return kinds[(turn + turn // among * ((1 - among) % len(kinds))) % len(kinds)]


def with_kind(program: Program, kind: Kind, pattern: Pattern, choices: Choices, *, first: bool) -> Program:
    """The program with inputs of this kind; of few values where there is no number to be near to.

    Where ties are left open, no value comes more often than it happens to. Nor does a computed one: large numbers make many equal
    ones of a softmax.
    """
    if leaves_ties(pattern) and (kind != "large" or _orders_what_it_computes(pattern)):
        return program
    if kind == "near":
        near = near_numbers(program, [pattern.rule])
        if first or any(x.around for x in near.inputs):
            return near
        kind = "few"
    if kind in ("few", "rows"):
        return few_values(program) if kind == "few" else flat_rows(program)
    defined = not any(_makes_integers(node) or _divides(node) for node in nodes_of(pattern))
    if kind == "growing":  # integers are as large at the beginning as at the end
        whole = defined and not any(x.torch_dtype.is_floating_point for x in program.inputs)
        return corner_values(program) if whole else growing_values(program)
    return large_values(program, choices) if kind == "large" and defined else program


def draws(pattern: Pattern) -> str:
    """The operator of a pattern that draws random numbers; empty where none does."""
    tagged = (
        node.target
        for node in nodes_of(pattern)
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    )
    return next(map(str, tagged), "")


def leaves_ties(pattern: Pattern) -> bool:
    """Whether torch does not say what the pattern computes of equal elements."""
    return any(map(node_leaves_ties, nodes_of(pattern)))


def _orders_what_it_computes(pattern: Pattern) -> bool:
    """Whether an operator that leaves ties orders something else than an argument of the pattern, or a view of one."""
    return any(not _is_argument(node.args[0]) for node in nodes_of(pattern) if node_leaves_ties(node))


def _is_argument(value: object) -> bool:
    while isinstance(value, fx.Node) and isinstance(value.target, torch._ops.OpOverload) and value.target.is_view:
        value = value.args[0]
    return isinstance(value, fx.Node) and value.op == "placeholder"


def node_leaves_ties(node: fx.Node) -> bool:
    """Whether an operator does not say which of several equal elements comes first, and its results depend on it."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    name = _torch_private.schema(node.target).name.split("::")[1]
    if name in _UNORDERED_PLACES:
        places = any(user.target is operator.getitem and user.args[1] == 1 for user in node.users)
        return places and not node.kwargs.get("stable")
    return name in _UNORDERED or (node.target.namespace == "npu" and "top_k" in name)


def _makes_integers(node: fx.Node) -> bool:
    """Whether an operator turns floating-point numbers into integers, which it does not say for numbers beyond theirs."""
    if (
        not isinstance(node.target, torch._ops.OpOverload)
        or _torch_private.schema(node.target).name != "aten::_to_copy"
    ):
        return False
    (source,) = node.all_input_nodes
    before, after = source.meta["val"].dtype, node.meta["val"].dtype
    return bool(before.is_floating_point and not after.is_floating_point and after != torch.bool)


def _divides(node: fx.Node) -> bool:
    """Whether an operator stops the process where the least integer is divided by -1."""
    name = _torch_private.schema(node.target).name if isinstance(node.target, torch._ops.OpOverload) else ""
    return name == "aten::div" and node.kwargs.get("rounding_mode") == "trunc"
