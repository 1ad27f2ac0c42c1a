"""The tables of the documentation are what the records say."""

from __future__ import annotations

import ast
import dataclasses
import re
import runpy
from pathlib import Path

import pytest
import torch_npu

from npu_emulator.settings import Settings
from npugraph_ex.config import variables
from npugraph_ex.fusion.rules import RULE_NAMES
from npugraph_ex.operators import OPERATORS
from npugraph_ex.versions.difference import differences

ROOT = Path(__file__).parent.parent
TABLES = runpy.run_path(str(ROOT / "docs" / "tables.py"))


@pytest.mark.parametrize("table", TABLES["TABLES"])
def test_the_table_in_the_page_is_the_one_of_the_records(table: str) -> None:
    """Where a record changed, ``python -m npu_emulator docs/tables.py`` writes the table anew."""
    page, text = TABLES["page_with_table"](table)
    assert page.read_text(encoding="utf-8") == text, "run: python -m npu_emulator docs/tables.py"


@pytest.mark.slow
def test_every_call_of_torch_npu_has_a_proof() -> None:
    """The source names what the list has and nothing else, and the installed wheel has each name in the file given for it."""
    calls, wheel = TABLES["device_calls"], Path(torch_npu.__file__).parent
    assert calls.used() == set(calls.PROOFS)
    absent = {name for difference in differences().values() for name in difference.absent}
    for name in sorted(set(calls.PROOFS) - absent):
        source = (wheel / calls.PROOFS[name]).read_text(encoding="utf-8")
        assert re.search(rf"\b{name.rpartition('.')[2]}\b", source), name


def test_every_record_has_its_row() -> None:
    """Rules in the order in which they are tried, operators by name; each row says what the thing does."""
    for rows, names in ((TABLES["rules"](), RULE_NAMES), (TABLES["operators"](), sorted(OPERATORS))):
        cells = [[cell.strip() for cell in row.split("|")[1:-1]] for row in list(rows)[2:]]
        assert [cell[0] for cell in cells] == [f"`{name}`" for name in names]
        assert all(len(cell[1]) > 10 for cell in cells)


_OF_THE_SYSTEM = {"PATH"}
"""Variables that every program has, and that say nothing of this project."""


def _variables_read(package: str) -> set[str]:
    """The environment variables that a package asks `os.environ` for, by text or by a constant of the module."""
    found = set()
    for file in (ROOT / package).rglob("*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        constants = {
            target.id: node.value.value
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(tree):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Attribute(attr="environ")), args=[asked, *_]):
                    pass
                case ast.Subscript(value=ast.Attribute(attr="environ"), slice=asked):
                    pass
                case ast.Compare(left=asked, comparators=[ast.Attribute(attr="environ")]):
                    pass
                case _:
                    continue
            name = asked.value if isinstance(asked, ast.Constant) else constants.get(getattr(asked, "id", ""))
            if name is not None and not name.startswith("_"):
                found.add(name)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("language", ["", "zh"])
def test_every_environment_variable_is_in_the_page(language: str) -> None:
    """Of the backend and the emulated device; the emulator's settings are in the table of their own page."""
    docs = ROOT / "docs" / language
    page = (docs / "reference" / "environment.md").read_text(encoding="utf-8")
    read = _variables_read("npugraph_ex") | _variables_read("npu_emulator") | set(variables.KNOWN)
    assert {"NPUGRAPH_EX_CACHE", "ASCEND_HOME_PATH", "NPU_EMULATOR", "TORCH_NPU_FALLBACK_CPU_DISABLE", "CXX"} <= read
    names = {f"NPU_EMULATOR_{field.name.upper()}" for field in dataclasses.fields(Settings)}
    assert {name for name in read - names - _OF_THE_SYSTEM if f"`{name}`" not in page} == set()
    settings = (docs / "how-to" / "emulator.md").read_text(encoding="utf-8")
    assert {name for name in names if f"`{name}`" not in settings} == set()
