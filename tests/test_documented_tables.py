"""The tables of the documentation are what the records say."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch_npu

from npugraph_ex.fusion.rules import RULE_NAMES
from npugraph_ex.operators import OPERATORS
from npugraph_ex.versions.difference import differences

TABLES = runpy.run_path(str(Path(__file__).parent.parent / "docs" / "tables.py"))


@pytest.mark.parametrize("table", TABLES["TABLES"])
def test_the_table_in_the_page_is_the_one_of_the_records(table: str) -> None:
    """Where a record changed, ``python -m npu_emulator docs/tables.py`` writes the table anew."""
    page, text = TABLES["page_with_table"](table)
    assert page.read_text(encoding="utf-8") == text, "run: python -m npu_emulator docs/tables.py"


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
