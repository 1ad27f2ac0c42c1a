"""What the public names are and what their docstrings begin with, read from the sources: nothing is imported, not even torch."""

from __future__ import annotations

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path

MODULES = (
    "npugraph_ex",
    "npugraph_ex.compat",
    "npugraph_ex.errors",
    "npugraph_ex.inference",
    "npugraph_ex.operators",
    "npugraph_ex.ops",
    "npugraph_ex.scope",
    "npugraph_ex.testing",
    "npu_emulator",
)
"""The public modules (docs/explanation/architecture.md, "What is public"); each gets a page of the reference."""


def source(module: str) -> Path:
    """The file that says which names a module offers: its stub, if it has one.

    Raises:
        LookupError: no file of this module is here.
    """
    package, *parts = module.split(".")
    found = find_spec(package)
    if found is None or found.origin is None:
        raise LookupError(f"{package} is not installed")
    path = Path(found.origin).parent.joinpath(*parts)
    return next(
        file for file in (path / "__init__.pyi", path / "__init__.py", path.with_suffix(".py")) if file.exists()
    )


def offered(module: str) -> list[str]:
    """The names that a public module offers: those in `__all__`, in its stub, or every class. Modules have pages instead."""
    tree = _tree(source(module))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    if any(isinstance(node, ast.ClassDef) for node in tree.body):
        return [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    froms = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module != "npugraph_ex"]
    return [alias.name for node in froms for alias in node.names]


def described(module: str, name: str) -> str:
    """The first paragraph of what a module's name says of itself; empty where it says nothing."""
    body = _tree(source(module)).body
    for node, following in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name:
            text = ast.get_docstring(node) or ""
        elif name in _assigned(node) and isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            text = str(following.value.value)
        elif isinstance(node, ast.ImportFrom) and any((one.asname or one.name) == name for one in node.names):
            return described(str(node.module), next(one.name for one in node.names if (one.asname or one.name) == name))
        else:
            continue
        if text:  # an overload says nothing
            return " ".join(text.partition("\n\n")[0].split())
    return ""


def methods(module: str, name: str) -> dict[str, str]:
    """The first paragraph of each public method and property of a class; empty for another name, or without its package."""
    try:
        body = _tree(source(module)).body
    except LookupError:
        return {}
    for node in body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            members = [one for one in node.body if isinstance(one, ast.FunctionDef) and not one.name.startswith("_")]
            return {one.name: " ".join((ast.get_docstring(one) or "").partition("\n\n")[0].split()) for one in members}
        if isinstance(node, ast.ImportFrom) and (
            aliases := [one for one in node.names if (one.asname or one.name) == name]
        ):
            return methods(str(node.module), aliases[0].name)
    return {}


def _assigned(node: ast.stmt) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


@cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))
