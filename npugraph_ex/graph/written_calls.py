"""The calls that the program's source has at a line, so that advice names the program's own variables."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

_OWN_NAMES = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda)
"""Their names mean nothing in the statement around them."""


@dataclass(frozen=True)
class WrittenCall:
    """A call in the source.

    Attributes:
        call: the expression.
        statement: the innermost statement that holds it.
        function: the innermost function that holds it, or the file.
    """

    call: ast.Call
    statement: ast.stmt
    function: ast.AST

    @property
    def names(self) -> frozenset[str]:
        """The variables and parameters of the function."""
        used = {node.id for node in ast.walk(self.function) if isinstance(node, ast.Name)}
        return frozenset(used | {node.arg for node in ast.walk(self.function) if isinstance(node, ast.arg)})


def calls_at(place: str) -> list[WrittenCall]:
    """The calls over ``file:line`` whose names are those of the statement; none if the source is not there."""
    file, _, line = place.rpartition(":")
    text = "".join(linecache.getlines(file))
    try:
        tree = _parsed(text)
    except SyntaxError:
        return []
    return list(_within(tree, int(line), None, tree)) if line else []


@lru_cache(maxsize=8)
def _parsed(text: str) -> ast.Module:
    return ast.parse(text)


def _within(node: ast.AST, line: int, statement: ast.stmt | None, function: ast.AST) -> Iterator[WrittenCall]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _OWN_NAMES) or (isinstance(child, ast.expr) and not _covers(child, line)):
            continue
        if isinstance(child, ast.Call) and statement is not None:
            yield WrittenCall(child, statement, function)
        is_function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
        inner = child if isinstance(child, ast.stmt) else statement
        yield from _within(child, line, inner, child if is_function else function)


def _covers(node: ast.expr, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)
