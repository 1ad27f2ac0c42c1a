"""A docstring names no file that has moved: each path of this project in one exists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("benches", "conformance", "docs", "npu_emulator", "npugraph_ex", "tests", "typing_tests")
_PATH = re.compile(rf"(?<![\w./<-])(?:{'|'.join(FOLDERS)})(?:/[\w.<>-]+)+/?")
_FILE = re.compile(r"`(\w+\.py)`")
_EXAMPLES = {"example.py"}  # files that a program writes


def _docstrings(source: str) -> Iterator[str]:
    """The strings that stand alone: those of modules, classes, functions and constants."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(ast.Constant(str(text))):
                yield text


def missing(source: str) -> list[str]:
    """The paths in the docstrings of a module that do not exist. `<name>` stands for any name; a file alone, for one anywhere."""
    text = "\n".join(_docstrings(source))
    paths = {path.rstrip("./") for path in _PATH.findall(text)}
    files = {f"*/**/{name}" for name in _FILE.findall(text) if name not in _EXAMPLES}
    return sorted(name for name in paths | files if not any(ROOT.glob(re.sub(r"<\w+>", "*", name))))


@pytest.mark.slow
@pytest.mark.parametrize("folder", FOLDERS)
def test_each_path_in_a_docstring_exists(folder: str) -> None:
    """Who reads it opens the file."""
    found = {path: missing(path.read_text(encoding="utf-8")) for path in (ROOT / folder).rglob("*.py")}
    assert found
    assert {str(path): names for path, names in found.items() if names} == {}


def test_a_path_that_does_not_exist_is_found() -> None:
    """From the root, in any docstring, or a file's name alone; not in other strings, nor another project's path."""
    source = '"""See docs/nowhere.md, `nobody.py`, `N_<name>.py` and vllm/nothing.py."""\nX = 1\n"""As docs/<name>.md says."""'
    assert missing(source) == ["*/**/nobody.py", "docs/nowhere.md"]
    assert missing("print('docs/nowhere.md')") == []
