"""Which way each condition of some modules went: functions of the running program that count it, in place of coverage.py's tracer.

A tracer looks at each line of everything that runs, torch's lines too. Here a function counts its own conditions, so the rest
runs as fast as ever: a random program takes a tenth longer.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from types import CodeType
from typing import Any

from npugraph_ex_conformance.mutation.sites import code_in, functions_of, parsed, running, with_code

_NAME = "__npugraph_ex_points__"
"""What a changed function calls; no name of a class, which Python would mangle."""


class Points:
    """How often each condition was true and false, and each body ran.

    Args:
        modules: whose conditions are counted.
    """

    def __init__(self, modules: Sequence[str]) -> None:
        self._counts: list[int] = []
        self._codes = [(module, self._counting(module)) for module in modules]

    def note(self, value: Any, point: int) -> Any:
        """Count a condition; it stays what it is."""
        self._counts[point + bool(value)] += 1
        return value

    @contextmanager
    def counting(self) -> Iterator[None]:
        """The functions of the modules count, for the length of a block."""
        with ExitStack() as stack:
            for module, codes in self._codes:
                vars(import_module(module))[_NAME] = (
                    self.note
                )  # for ever: a closure that a cache keeps goes on calling it
                for name, code in codes.items():
                    with suppress(LookupError):  # what a decorator made of it counts nothing
                        stack.enter_context(with_code(running(module, name), code))
            yield

    def taken(self) -> list[tuple[int, int]]:
        """What was reached since the last call: points, each with how often, as a power of two up to eight."""
        found = [(point, min(count.bit_length(), 4)) for point, count in enumerate(self._counts) if count]
        self._counts[:] = [0] * len(self._counts)
        return found

    def _counting(self, module: str) -> dict[str, CodeType]:
        """The functions of a module that count, by name."""
        tree, file = parsed(module)
        changed = ast.fix_missing_locations(_Counting(self._counts).visit(copy.deepcopy(tree)))
        whole = compile(changed, file, "exec")
        return {name: code_in(whole, name) for name in functions_of(tree)}


class _Counting(ast.NodeTransformer):
    """Puts a call around each condition, and one before each body that a condition does not open."""

    def __init__(self, counts: list[int]) -> None:
        self._counts = counts

    def _noted(self, value: ast.expr) -> ast.expr:
        point = len(self._counts)
        self._counts += [0, 0]
        return ast.copy_location(ast.Call(ast.Name(_NAME, ast.Load()), [value, ast.Constant(point)], []), value)

    def visit(self, node: ast.AST) -> Any:
        self.generic_visit(node)
        if isinstance(node, (ast.If, ast.IfExp, ast.While)):
            node.test = self._noted(node.test)
        elif isinstance(node, ast.comprehension):
            node.ifs = [self._noted(condition) for condition in node.ifs]
        elif isinstance(node, ast.BoolOp):
            node.values = [*map(self._noted, node.values[:-1]), node.values[-1]]
        elif isinstance(node, (ast.FunctionDef, ast.For, ast.ExceptHandler, ast.match_case)):
            node.body.insert(0, ast.copy_location(ast.Expr(self._noted(ast.Constant(value=True))), node.body[0]))
        return node
