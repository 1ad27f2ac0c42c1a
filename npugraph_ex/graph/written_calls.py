"""The calls that the program's source has at a line, so that advice names the program's own variables."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

_OWN_NAMES = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda)
"""Their names mean nothing in the statement around them."""
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


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


def calls_at(place: str) -> list[WrittenCall]:
    """The calls over ``file:line`` whose names are those of the statement; none if the source is not there."""
    tree, line = _source(place)
    return list(_within(tree, line, None, tree))


def function_at(place: str) -> ast.AST:
    """The innermost function at ``file:line``, or the file; an empty file if the source is not there."""
    tree, line = _source(place)
    around = [node for node in ast.walk(tree) if isinstance(node, _FUNCTIONS) and _covers(node, line)]
    return max(around, key=lambda node: node.lineno, default=tree)


def names_of(function: ast.AST) -> frozenset[str]:
    """The variables and parameters of a function."""
    used = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
    return frozenset(used | {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)})


def _source(place: str) -> tuple[ast.Module, int]:
    file, _, line = place.rpartition(":")
    try:
        return _parsed("".join(linecache.getlines(file))), int(line or 0)
    except SyntaxError:
        return _parsed(""), 0


@lru_cache(maxsize=8)
def _parsed(text: str) -> ast.Module:
    return ast.parse(text)


def _within(node: ast.AST, line: int, statement: ast.stmt | None, function: ast.AST) -> Iterator[WrittenCall]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _OWN_NAMES) or (isinstance(child, ast.expr) and not _covers(child, line)):
            continue
        if isinstance(child, ast.Call) and statement is not None:
            yield WrittenCall(child, statement, function)
        inner = child if isinstance(child, ast.stmt) else statement
        yield from _within(child, line, inner, child if isinstance(child, _FUNCTIONS) else function)


def _covers(node: ast.expr | ast.stmt, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)
