"""Expressions over sizes as text: read only as arithmetic, because they come from a file.

Two kinds occur: a symbolic size, such as ``2*s77``, and a condition on inputs, such as ``L['t1'].size()[0] == L['t0']``.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Collection, Mapping
from types import CodeType
from typing import Any

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from npugraph_ex import _torch_private

_QUESTIONS = frozenset({"size", "stride", "storage_offset"})
_ROUNDING = frozenset({"math.floor", "math.ceil", "math.trunc"})
_CONDITION = (
    ast.Expression, ast.Constant, ast.Name, ast.Load, ast.Subscript, ast.Attribute, ast.Call,
    ast.BoolOp, ast.IfExp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.USub, ast.UAdd,
    ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow,
    ast.Compare, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE,
)  # fmt: skip
"""The syntax nodes of a condition."""


class Condition:
    """A condition on the sizes of a graph's inputs, in the form of `_torch_private.input_guards`.

    Args:
        text: the condition; empty for none.
        from_one: whether a size of one is allowed where the text has a lower bound of two, as torch gives each symbolic size.

    Raises:
        ValueError: the text is no such condition.
    """

    def __init__(self, text: str, *, from_one: bool = False) -> None:
        self._names = {**_torch_private.guard_names(), "__builtins__": {}}
        self._text = ast.unparse(_FromOne().visit(ast.parse(text, mode="eval"))) if from_one and text else text
        text = self._text
        self._code = self._checked(ast.parse(text, mode="eval")) if text else None

    def holds(self, inputs: list[Any]) -> bool:
        """Whether it holds for ``inputs``: the tensors and sizes among a graph's inputs, in order."""
        return self._code is None or self._value(self._code, inputs)

    def broken(self, inputs: list[Any], names: list[str]) -> str:
        """The first part of it that does not hold, with the inputs' ``names``; the whole if no single part fails."""
        whole = ast.parse(self._text, mode="eval").body
        parts = whole.values if isinstance(whole, ast.BoolOp) else [whole]
        codes = [(part, self._checked(ast.Expression(part))) for part in parts]
        text = next((ast.unparse(part) for part, code in codes if not self._value(code, inputs)), self._text)
        return re.sub(r"L\['t(\d+)'\]", lambda match: names[int(match[1])], text)

    def _value(self, code: CodeType, inputs: list[Any]) -> bool:
        here = {f"t{position}": value for position, value in enumerate(inputs)}
        return bool(eval(code, self._names, {"L": here}))  # noqa: S307 - `_checked` let arithmetic through only

    def _checked(self, tree: ast.Expression) -> CodeType:
        for part in ast.walk(tree):
            unknown = isinstance(part, ast.Name) and part.id != "L" and part.id not in self._names
            reaching = (
                isinstance(part, ast.Attribute) and part.attr not in _QUESTIONS and ast.unparse(part) not in _ROUNDING
            )
            if not isinstance(part, _CONDITION) or unknown or reaching or "__" in getattr(part, "id", ""):
                raise ValueError(f"{ast.unparse(part)} is no condition on sizes")
        return compile(tree, "<sizes of a saved graph>", "eval")


def excludes_one(condition: str) -> bool:
    """Whether a condition has the lower bound of two that torch gives each symbolic size."""
    return bool(condition) and any(map(_is_bound_of_two, ast.walk(ast.parse(condition, mode="eval"))))


def _is_bound_of_two(part: ast.AST) -> bool:
    first = part.left if isinstance(part, ast.Compare) and isinstance(part.ops[0], ast.LtE) else None
    return isinstance(first, ast.Constant) and first.value == 2


class _FromOne(ast.NodeTransformer):
    """Lowers such bounds to one."""

    def visit_Compare(self, node: ast.Compare) -> ast.Compare:
        """Edit one comparison."""
        if _is_bound_of_two(node):
            node.left = ast.Constant(1)
        return node


class SymbolicSizes:
    """Makes symbolic sizes from their text, in a new fake mode.

    Args:
        hints: the value that each symbol had in the example inputs.

    Attributes:
        mode: the fake mode.
    """

    def __init__(self, hints: Mapping[str, int]) -> None:
        self.mode, self._symbols = _torch_private.new_symbols(hints)
        self._hints = {self._symbols[name]: hint for name, hint in hints.items()}
        self._names = {**_torch_private.size_functions(), **self._symbols}

    def size(self, spelt: int | str) -> int | torch.SymInt:
        """A size from its text: a number, or an expression over the symbols."""
        if isinstance(spelt, int):
            return spelt
        expression = self._expression(ast.parse(spelt, mode="eval").body)
        hint = self._in_the_examples(expression)
        return _torch_private.symbolic_size(self.mode, expression, hint)

    def _in_the_examples(self, expression: Any) -> int:
        return int(sympy.sympify(expression).xreplace(self._hints))

    def value(self, size: Any, ones: Collection[str]) -> Any:
        """The number that a size of this mode is where the symbols ``ones`` are one and the others as in the examples."""
        if not isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return size
        at = {
            symbol: sympy.Integer(1 if name in ones else self._hints[symbol]) for name, symbol in self._symbols.items()
        }
        return sympy.sympify(size.node.expr).xreplace(at)

    def _expression(self, tree: ast.expr) -> Any:
        if isinstance(tree, ast.Constant) and type(tree.value) is int:
            return sympy.Integer(tree.value)
        if isinstance(tree, ast.Name):
            return self._names[tree.id]
        if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.USub):
            return -self._expression(tree.operand)
        if isinstance(tree, ast.BinOp):
            rule = self._rules[type(tree.op)]
            return rule(self._expression(tree.left), self._expression(tree.right))
        if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) and not tree.keywords:
            return self._names[tree.func.id](*[self._expression(argument) for argument in tree.args])
        raise ValueError(f"{ast.unparse(tree)} is no arithmetic of sizes")

    @property
    def _rules(self) -> dict[type[ast.operator], Any]:
        return {
            ast.Add: operator.add,
            ast.Sub: operator.sub,
            ast.Mult: operator.mul,
            ast.Pow: operator.pow,
            ast.FloorDiv: self._names["FloorDiv"],
            ast.Mod: self._names["PythonMod"],
        }


class NumericSizes(SymbolicSizes):
    """The same with numbers: each size is what it is in the examples."""

    def __init__(self, hints: Mapping[str, int]) -> None:
        super().__init__(hints)
        self.mode = FakeTensorMode()

    def size(self, spelt: int | str) -> int:
        """A size from its text."""
        if isinstance(spelt, int):
            return spelt
        return self._in_the_examples(self._expression(ast.parse(spelt, mode="eval").body))
