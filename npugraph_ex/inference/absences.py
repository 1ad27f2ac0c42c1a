"""What traced functions look for by name and do not find: torch has no guard that asks later whether it is there.

``os.environ.get("SCALE", "1")``, ``hasattr(settings, "scale")`` or ``CONFIG["scale"]`` in ``try``: where the name is absent, the
compiled program is that of its absence. The names are read from the source of the functions.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import os
from collections.abc import Iterable, Iterator
from types import MethodDescriptorType, ModuleType
from typing import Any

_UNKNOWN = object()
"""The value of an expression that has none before the call, or that only the program's own code could compute."""
_COMPUTED = (property, staticmethod, classmethod, MethodDescriptorType)


def absences(module: ModuleType, source: str, functions: Iterable[tuple[int, int]]) -> list[str]:
    """Expressions in functions whose last name or key is absent now, each as ``appeared`` reads it.

    Args:
        module: where the functions are defined: its globals are theirs.
        source: the whole text of the module.
        functions: of each, its first line, from 1, and the line behind its last one.
    """
    everything = [node for node in ast.walk(ast.parse(source)) if hasattr(node, "lineno")]
    texts: set[str] = set()
    for first, last in functions:
        nodes = [node for node in everything if first <= node.lineno < last]
        local = set(_bound(nodes))
        looks = (one for node in nodes if (one := _looked_up(node)) is not None)
        texts.update(ast.unparse(one) for one in looks if _root(one) not in {"", *local})
    return sorted(text for text in texts if _is_absent(text, module))


def appeared(module: ModuleType, expressions: list[str]) -> str | None:
    """The first of the expressions that has a value now; None if none has."""
    return next((one for one in expressions if not _is_absent(one, module)), None)


def _bound(nodes: list[ast.AST]) -> Iterator[str]:
    """The names that are not the module's within these nodes."""
    for node in nodes:
        if isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).partition(".")[0]
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.ExceptHandler)) and node.name:
            yield node.name


def _looked_up(node: ast.AST) -> ast.expr | None:
    """What a node looks for, as a name, an attribute or a subscript; None where it is no look."""
    if isinstance(node, (ast.Name, ast.Attribute, ast.Subscript)):
        return node
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.ops[0], (ast.In, ast.NotIn)):
        return ast.Subscript(node.comparators[0], node.left, ast.Load())
    if not isinstance(node, ast.Call) or not node.args:
        return None
    function, key = ast.unparse(node.func), node.args[0]
    if function in {"hasattr", "getattr"} and len(node.args) > 1:
        name = node.args[1]
        if isinstance(name, ast.Constant) and isinstance(name.value, str) and name.value.isidentifier():
            return ast.Attribute(key, name.value, ast.Load())
        return None
    if function == "os.getenv":
        return ast.Subscript(ast.Attribute(ast.Name("os", ast.Load()), "environ", ast.Load()), key, ast.Load())
    if isinstance(node.func, ast.Attribute) and node.func.attr == "get":
        return ast.Subscript(node.func.value, key, ast.Load())
    return None


def _root(node: ast.expr) -> str:
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _is_absent(expression: str, module: ModuleType) -> bool:
    try:
        _value(ast.parse(expression, mode="eval").body, vars(module))
    except LookupError:
        return True
    return False


def _value(node: ast.expr, names: dict[str, Any]) -> object:
    """The value of an expression, without running any code of the program.

    Raises:
        LookupError: the last name or key is not there.
    """
    if isinstance(node, ast.Name):
        return names[node.id] if node.id in names else vars(builtins)[node.id]
    if not isinstance(node, (ast.Attribute, ast.Subscript)):
        return _UNKNOWN
    try:
        owner = _value(node.value, names)
    except LookupError:  # the name before it is what is absent
        return _UNKNOWN
    if isinstance(node, ast.Attribute):
        return _attribute(owner, node.attr)
    if not isinstance(node.slice, ast.Constant):
        return _UNKNOWN
    key = node.slice.value
    return owner[key] if type(owner) is dict or (owner is os.environ and isinstance(key, str)) else _UNKNOWN


def _attribute(owner: object, name: str) -> object:
    if owner is _UNKNOWN:
        return _UNKNOWN
    try:
        found = inspect.getattr_static(owner, name)
    except AttributeError:
        of_module = isinstance(owner, ModuleType) and "__getattr__" in vars(owner)
        if of_module or hasattr(type(owner), "__getattr__"):
            return _UNKNOWN  # which may give it
        raise LookupError(name) from None
    return _UNKNOWN if isinstance(found, _COMPUTED) else found
