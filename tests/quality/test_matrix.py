"""The table of checks by pair of torch and torch_npu: the pairs are the same everywhere, and the page keeps what was not run."""

from __future__ import annotations

import importlib.util
from configparser import ConfigParser
from pathlib import Path
from types import ModuleType

import pytest

from npugraph_ex.versions import pairs

ROOT = Path(__file__).parents[2]


@pytest.fixture
def matrix() -> ModuleType:
    """The script."""
    spec = importlib.util.spec_from_file_location("matrix", ROOT / ".ci" / "matrix.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_pair_has_its_environment(matrix: ModuleType) -> None:
    """The script reads the tested pairs, and tox installs each of them."""
    assert matrix.pairs() == pairs.TESTED
    tox = ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini", encoding="utf-8")
    (name,) = (name for name in tox.sections() if name.startswith("testenv:tests-torch"))
    installed = tox[name]["deps"].split("\n")
    for torch, torch_npu in pairs.TESTED.items():
        factor = f"torch{''.join(torch.split('.')[:2])}"
        assert factor.removeprefix("torch") in name
        assert {f"{factor}: torch=={torch}+cpu", f"{factor}: torch_npu=={torch_npu}"} <= set(installed)
        assert f"{factor}: TORCH = {torch}" in tox[name]["set_env"]


def test_the_page_keeps_its_other_cells(matrix: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What a run writes is what the next one reads, in any order, in either table."""
    monkeypatch.setattr(matrix, "PAGE", tmp_path / "page.md")
    tables = f"{matrix.CHECKED}{matrix.END}between\n{matrix.TIMED}{matrix.END}"
    matrix.PAGE.write_text(f"before\n{tables}after\n", encoding="utf-8")
    written = {torch: {check: f"{torch} {check}" for check in matrix.CHECKS} for torch in matrix.pairs()}
    for torch in reversed(matrix.pairs()):
        for check in matrix.CHECKS:
            matrix.write(torch, {check: f"{torch} {check}"})
    matrix.write("2.12.0", {"a call": "9 us"}, matrix.TIMED, ["a call"])
    page = matrix.PAGE.read_text(encoding="utf-8")
    assert page.startswith("before\n")
    assert "between\n" in page
    assert page.endswith("after\n")
    assert matrix.cells(page, matrix.CHECKED) == written
    times = {torch: row["a call"] for torch, row in matrix.cells(page, matrix.TIMED).items()}
    assert times == dict.fromkeys(matrix.pairs(), "not run") | {"2.12.0": "9 us"}


def test_a_cell_adds_up_its_commands(matrix: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each command's closing line counts once; the cell is bold if one of them failed, or ran nothing."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "say"
    program.write_text("#!/bin/sh\necho '3 passed in a line of a test'\necho \"= $1 in 9.1s (0:09) =\"\nexit $2\n")
    program.chmod(0o700)

    def cell(*commands: str) -> str:
        monkeypatch.setattr(matrix, "CHECKS", {"smoke": commands})
        said: str = matrix.run("2.10.0", "smoke", tmp_path, tmp_path).rpartition(", ")[0]
        return said

    assert cell("say '7 passed, 1 skipped' 0", "say '2 passed' 0") == "9 passed, 1 skipped"
    assert cell("say '7 passed' 0", "say '2 failed, 1 error' 1") == "**1 error, 2 failed, 7 passed**"
    assert cell("say '2 failed' 1", "say '7 passed' 0") == "**2 failed, 7 passed**"
    assert cell("say nothing 3") == "**no tests**"
