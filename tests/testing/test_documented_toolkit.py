"""The toolkit's page: its examples run as printed, and its table has every public name."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from npugraph_ex import testing

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "testing.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_examples_run_as_printed(number: int, tmp_path: Path) -> None:
    """Each block is a program of its own."""
    path = tmp_path / "example.py"
    path.write_text(BLOCKS[number], encoding="utf-8")
    runpy.run_path(str(path))


def test_the_table_names_what_is_public() -> None:
    """Every public name but the errors and results is in the table, and the table names nothing else."""
    table = {name for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")
             for name in re.findall(r"`(\w+)`", line.split("|")[1])}  # fmt: skip
    results = {"ValidationFinding", "Validation", "TargetError", "RulesNotFoundError", "ReplacementRefutedError"}
    assert table - {"reporting"} == set(testing.__all__) - results


@pytest.mark.parametrize("name", testing.__all__)
def test_every_public_name_is_there(name: str) -> None:
    """Its module has it; it loads on first use."""
    assert getattr(testing, name).__class__.__name__ != "module"
