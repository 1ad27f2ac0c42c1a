"""What is public is knowable: the page on architecture lists it, the reference shows it, underscores mean private."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

import npugraph_ex
from npugraph_ex.commands import public_names

_ROOT = Path(__file__).parents[2]
_SECTION = re.search(
    r"## What is public\n(.*?)\n## ",
    (_ROOT / "docs" / "explanation" / "architecture.md").read_text(encoding="utf-8"),
    re.DOTALL,
)[1]
_TABLE = [
    name
    for row in _SECTION.splitlines()
    if row.startswith("| `")
    for name in re.findall(r"`([\w.]+)`", row.split("|")[1])
]
_PATHS = re.findall(r"`(\w+)`", _SECTION.partition("`__all__` stay:")[2].partition("\n\n")[0])


def test_the_page_lists_every_module_that_the_facade_offers() -> None:
    """A module that `npugraph_ex` re-exports is public or an import path of clients, and the page says which."""
    offered = {name for name, home in npugraph_ex._names.home_of.items() if home == "npugraph_ex"}
    listed = {name.removeprefix("npugraph_ex.") for name in _TABLE if name.startswith("npugraph_ex.")}
    assert offered | {"testing", "operators"} == listed | {*_PATHS}


def test_each_public_module_has_a_page_in_the_reference() -> None:
    """The settings of the documentation make a page of each public module and of no other."""
    assert sorted(public_names.MODULES) == sorted(_TABLE)


@pytest.mark.parametrize("module", [name for name in _TABLE if name != "npugraph_ex.errors"])
def test_a_public_module_says_which_names_are_public(module: str) -> None:
    """`__all__` is there, and each name in it."""
    names = import_module(module).__all__
    assert names
    assert [name for name in names if not hasattr(import_module(module), name)] == []


def _imports(path: Path) -> Iterator[str]:
    """The full name of everything that a file imports, inside functions too."""
    for statement in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom):
            yield from (f"{statement.module}.{alias.name}" for alias in statement.names)


@pytest.mark.slow
def test_a_name_with_an_underscore_stays_in_its_package() -> None:
    """No module imports a private file or name of a package that it is not in."""
    checked, foreign = 0, []
    for path in (source for package in ("npugraph_ex", "npu_emulator") for source in (_ROOT / package).rglob("*.py")):
        package = ".".join(path.relative_to(_ROOT).parts[:-1])
        for name in _imports(path):
            owner = re.match(r"((?:npugraph_ex|npu_emulator)(?:\.[a-z]\w*)*)\._[a-z]", name)
            if owner:
                checked += 1
                if not f"{package}.{path.stem}.".startswith(f"{owner[1]}."):
                    foreign.append(f"{path.relative_to(_ROOT)} imports {name}")
    assert checked > 50, "the imports were not found"
    assert foreign == []


@pytest.mark.slow
def test_the_first_line_of_a_property_has_no_colon() -> None:
    """The reference takes what stands before a colon for the type of the property, and the site's build fails."""
    found = []
    for path in [*(_ROOT / "npugraph_ex").rglob("*.py"), *(_ROOT / "npu_emulator").rglob("*.py")]:
        for part in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(part, ast.FunctionDef) and any("property" in ast.unparse(d) for d in part.decorator_list):
                first = (ast.get_docstring(part) or "").partition("\n")[0]
                if re.search(r"(?<!:):(\s|$)", first):
                    found.append(f"{path.relative_to(_ROOT)}:{part.lineno}: {first}")
    assert found == []
