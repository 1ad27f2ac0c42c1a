"""Each public name has an example that runs."""

from __future__ import annotations

import ast
import re
import runpy
import sys
from collections.abc import Iterator
from importlib import import_module
from inspect import isclass, ismodule
from pathlib import Path
from types import ModuleType

import pytest
from printed import blocks

import npugraph_ex
from npugraph_ex import errors
from npugraph_ex.fusion.registry import USER_RULES

DOCS = Path(__file__).parents[1] / "docs"
_CODE = [block.code for block in blocks(DOCS / "reference" / "examples.md") if block.language == "python"]
_MODULES = [
    "npugraph_ex",
    "npugraph_ex.compat",
    "npugraph_ex.inference",
    "npugraph_ex.operators",
    "npugraph_ex.ops",
    "npugraph_ex.scope",
    "npugraph_ex.testing",
]


@pytest.fixture
def _library_as_it_was() -> Iterator[None]:
    level, rules = npugraph_ex.logger.level, USER_RULES.snapshot()
    yield
    npugraph_ex.logger.setLevel(level)
    USER_RULES.drop([rule for rule in USER_RULES.snapshot() if rule not in rules])


@pytest.mark.slow
@pytest.mark.usefixtures("_library_as_it_was", "as_torchair")
def test_the_examples_run_as_printed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """From top to bottom, in one program."""
    monkeypatch.chdir(tmp_path)  # some write files
    program = ModuleType("examples")
    monkeypatch.setitem(sys.modules, "examples", program)  # guards look their modules up there
    for number, code in enumerate(_CODE):
        exec(compile(code, f"block {number}", "exec"), vars(program))  # noqa: S102 - the page's own code
    assert len(_CODE) > 15


@pytest.mark.parametrize("module", [*_MODULES, "npu_emulator"])
def test_every_public_name_is_in_an_example(module: str) -> None:
    """As a name or an attribute in the code of a block, not in a remark; modules have pages of their own."""
    offered = import_module(module)
    parts = [part for code in _CODE for part in ast.walk(ast.parse(code))]
    used = {getattr(part, "attr", getattr(part, "id", getattr(part, "name", ""))) for part in parts}
    names = [name for name in offered.__all__ if not ismodule(getattr(offered, name))]
    assert names
    assert [name for name in names if name not in used] == []


@pytest.mark.parametrize("module", [*_MODULES, "npu_emulator", "npugraph_ex.errors"])
def test_the_reference_leads_to_a_block_that_uses_the_name(module: str) -> None:
    """The block below the heading of its module, where it is used there; addresses are different."""
    examples = runpy.run_path(str(DOCS / "examples.py"))
    offered = import_module(module)
    classes = [name for name, kind in vars(offered).items() if isclass(kind) and kind.__module__ == module]
    names = [name for name in getattr(offered, "__all__", classes) if not ismodule(getattr(offered, name))]
    for name in names:
        assert re.search(rf"\b{name}\b", _CODE[examples["block_of"](module, name)])
    assert len({examples["anchor"](module, name) for name in names}) == len(names)
    assert examples["block_of"]("npugraph_ex.operators", "ulp") != examples["block_of"]("npugraph_ex.testing", "ulp")
    with pytest.raises(LookupError, match=r"no example of npugraph_ex.operators.nothing"):
        examples["block_of"]("npugraph_ex.operators", "nothing")


def test_methods_of_returned_objects_have_examples() -> None:
    """Below the heading of their class; a class without one has none."""
    examples = runpy.run_path(str(DOCS / "examples.py"))
    shown = {"PassReport": ["require", "fusions", "near_misses"], "Findings": ["table", "to_sarif"], "Page": ["html"]}
    for owner, names in {**shown, "DecodeSession": ["warm_up", "refresh"], "KernelLog": ["of", "save"]}.items():
        for name in names:
            assert f".{name}" in _CODE[examples["block_of"](owner, name)]
        assert examples["block_of"](owner, owner) == examples["block_of"](owner, names[0])
    assert examples["uses"]("npugraph_ex.testing", "StreamBuilder", "fork")
    assert not examples["uses"]("npugraph_ex.testing", "StreamBuilder", "to_sarif")
    assert not examples["is_shown"]("Timeline", "to_sarif")
    assert not examples["is_shown"]("Branch", "Branch")


def test_every_public_module_is_looked_at() -> None:
    """Those in the table of the page on architecture."""
    page = (DOCS / "explanation" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.+?) \|", page.partition("## What is public\n")[2].partition("\n## ")[0], re.MULTILINE)
    listed = re.findall(r"`([\w.]+)`", " ".join(rows))
    assert sorted(listed) == sorted([*_MODULES, "npu_emulator", "npugraph_ex.errors"])


def test_every_error_is_in_an_example() -> None:
    """All classes of that module are public."""
    used = {name for code in _CODE for name in re.findall(r"errors\.(\w+)", code)}
    assert {
        name for name, kind in vars(errors).items() if isclass(kind) and kind.__module__ == errors.__name__
    } - used == set()
