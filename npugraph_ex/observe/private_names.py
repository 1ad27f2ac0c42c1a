"""Which private names of torch and torch_npu this project uses, read from its source, and which of them a release lacks.

A new release may move any of them. So the list is made from the source each time, and asking a release for every name takes
seconds, where a test run finds the first one that is gone. A part of a name that begins with an underscore makes it private.
Attributes of objects (``overload._schema``) are not in it: the source does not say of what class an object is.
"""

from __future__ import annotations

import ast
import importlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TypeGuard

from npugraph_ex.versions.difference import differences

_FOREIGN = ("torch", "torch_npu")
_OWN = ("npugraph_ex", "npu_emulator")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def used() -> dict[str, list[str]]:
    """Every private name, as ``torch._guards.TracingContext``, with the files that use it."""
    found: dict[str, set[str]] = defaultdict(set)
    for package in _OWN:
        spec = find_spec(package)
        if spec is None or spec.origin is None:
            continue
        folder = Path(spec.origin).parent
        for path in sorted(folder.rglob("*.py")):
            for name in _names(ast.parse(path.read_text(encoding="utf-8"))):
                found[name].add(f"{package}/{path.relative_to(folder)}")
    return {name: sorted(files) for name, files in sorted(found.items())}


def missing(names: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Those of ``names`` that the installed torch and torch_npu do not have. Both are imported.

    A name that `versions` uses with other releases only is not missing.
    """
    elsewhere = {name for difference in differences().values() for name in difference.absent}
    return {name: files for name, files in names.items() if name not in elsewhere and not _exists(name)}


def _names(scope: ast.AST, outer: Mapping[str, str] | None = None) -> Iterator[str]:
    """The private names in a module or function: what it imports, and attributes of modules that it imports.

    ``outer`` has the imports of the scopes around it: the local name to the full one. A local variable hides them.
    """
    own = list(_own_nodes(scope))
    hidden = {node.arg if isinstance(node, ast.arg) else node.id for node in own if _binds(node)}
    known = {name: full for name, full in (outer or {}).items() if name not in hidden}
    for node in own:
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                known[alias.asname or first] = alias.name if alias.asname else first
                yield from _private(alias.name)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield from _private(f"{node.module}.{alias.name}")
    for child in ast.iter_child_nodes(scope):
        yield from _attributes(child, known)


def _own_nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a scope, without those inside the functions that it defines."""
    for child in ast.iter_child_nodes(scope):
        yield child
        if not isinstance(child, _FUNCTIONS):
            yield from _own_nodes(child)


def _binds(node: ast.AST) -> TypeGuard[ast.arg | ast.Name]:
    return isinstance(node, ast.arg) or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))


def _attributes(node: ast.AST, known: Mapping[str, str]) -> Iterator[str]:
    """The private attributes below a node, each with all that is asked of it."""
    if isinstance(node, _FUNCTIONS):
        yield from _names(node, known)
        return
    whole = _dotted(node, known) if isinstance(node, ast.Attribute) else None
    if whole is not None:
        yield from _private(whole)
        return
    for child in ast.iter_child_nodes(node):
        yield from _attributes(child, known)


def _dotted(node: ast.expr, known: Mapping[str, str]) -> str | None:
    """The full name of an attribute of an imported module; None of anything else."""
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = _dotted(node.value, known)
        return None if owner is None else f"{owner}.{node.attr}"
    return None


def _private(name: str) -> Iterator[str]:
    """The name, if it is a private one of torch's or torch_npu's."""
    parts = name.split(".")
    if parts[0] in _FOREIGN and any(part.startswith("_") and not part.startswith("__") for part in parts):
        yield name


def _exists(name: str) -> bool:
    parts = name.split(".")
    owner = importlib.import_module(parts[0])
    for at, part in enumerate(parts[1:], 2):
        if not hasattr(owner, part):
            try:
                owner = importlib.import_module(".".join(parts[:at]))
            except ImportError:
                return False
        else:
            owner = getattr(owner, part)
    return True
