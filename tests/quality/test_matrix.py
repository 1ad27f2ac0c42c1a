"""The table of checks by pair of torch and torch_npu: the pairs are the same everywhere, and the page keeps what was not run."""

from __future__ import annotations

import argparse
import importlib.util
import re
from collections.abc import Callable
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


def test_every_release_of_transformers_has_its_environment(matrix: ModuleType) -> None:
    """Tox installs each of them, and the oldest is the lower bound of the package."""
    tox = ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini", encoding="utf-8")
    (name,) = (name for name in tox.sections() if name.startswith("testenv:tests-transformers"))
    for release in matrix.TRANSFORMERS:
        factor = matrix.environment_of(release).removeprefix("tests-")
        assert f"{factor}: transformers=={release}" in tox[name]["deps"].split("\n")
        assert factor.removeprefix("transformers") in name
    oldest = ".".join(min(matrix.TRANSFORMERS).split(".")[:2])
    bounds = re.findall(r'"transformers>=([\d.]+),', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert set(bounds) == {oldest}


def test_a_release_of_transformers_is_a_column(
    matrix: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What lifting saves by model; the columns of other releases stay, and a bold cell is a failure."""
    monkeypatch.setattr(matrix, "PAGE", tmp_path / "page.md")
    matrix.PAGE.write_text(f"before\n{matrix.LIFTED}{matrix.END}after\n", encoding="utf-8")
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    options = argparse.Namespace(work=tmp_path, environment=tmp_path, keep_page=False)
    for release, cell, status in (("5.0.0", "9 → 4", 0), ("4.57.6", "**9 → 11**", 1)):
        python.write_text(f'#!/bin/sh\necho \'{{"Llama": "{cell}"}}\' > $2\nexit {status}\n', encoding="utf-8")
        python.chmod(0o700)
        assert matrix.lifted(release, options) == bool(status)
    found = matrix.cells(matrix.PAGE.read_text(encoding="utf-8"), matrix.LIFTED, names=1)
    assert found == {"Llama": {"4.57.6": "**9 → 11**", "5.0.0": "9 → 4", "5.24.0": "not run"}}


def test_the_page_keeps_its_other_cells(matrix: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What a run writes is what the next one reads, in any order, in either table."""
    monkeypatch.setattr(matrix, "PAGE", tmp_path / "page.md")
    tables = f"{matrix.CHECKED}{matrix.END}between\n{matrix.TIMED}{matrix.END}"
    matrix.PAGE.write_text(f"before\n{tables}after\n", encoding="utf-8")
    written = {torch: {check: f"{torch} {check}" for check in matrix.PAIR_CHECKS} for torch in matrix.pairs()}
    for torch in reversed(matrix.pairs()):
        for check in matrix.PAIR_CHECKS:
            matrix.write(torch, {check: f"{torch} {check}"})
    matrix.write("2.12.0", {"a call": "9 us"}, matrix.TIMED, ["a call"])
    page = matrix.PAGE.read_text(encoding="utf-8")
    assert page.startswith("before\n")
    assert "between\n" in page
    assert page.endswith("after\n")
    assert matrix.cells(page, matrix.CHECKED) == written
    times = {torch: row["a call"] for torch, row in matrix.cells(page, matrix.TIMED).items()}
    assert times == dict.fromkeys(matrix.pairs(), "not run") | {"2.12.0": "9 us"}


@pytest.fixture
def cell(matrix: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., str]:
    """Runs a check of some commands. They have a program `say`: it prints a closing line of pytest and adds its words to `ran`."""
    program = tmp_path / "bin" / "say"
    program.parent.mkdir()
    lines = (
        "echo '3 passed in a line of a test'",
        'echo "= $1 in 9.1s (0:09) ="',
        f'echo "$1" >> {tmp_path}/ran',
        "exit $2",
    )
    program.write_text("\n".join(("#!/bin/sh", *lines)))
    program.chmod(0o700)

    def run(*commands: str, resume: bool = False) -> str:
        monkeypatch.setattr(matrix, "CHECKS", {"smoke": commands})
        options = argparse.Namespace(work=tmp_path, environment=tmp_path, jobs=1, resume=resume)
        said: str = matrix.run("2.10.0", "smoke", options).rpartition(", ")[0]
        return said

    return run


def test_a_cell_adds_up_its_commands(cell: Callable[..., str]) -> None:
    """Each command's closing line counts once; the cell is bold if one of them failed, or ran nothing."""
    assert cell("say '7 passed, 1 skipped' 0", "say '2 passed' 0") == "9 passed, 1 skipped"
    assert cell("say '7 passed' 0", "say '2 failed, 1 error' 1") == "**1 error, 2 failed, 7 passed**"
    assert cell("say '2 failed' 1", "say '7 passed' 0") == "**2 failed, 7 passed**"
    assert cell("say nothing 3") == "**no tests**"


def test_a_resumed_check_keeps_what_passed(cell: Callable[..., str], tmp_path: Path) -> None:
    """A part that failed, that never ended, or whose command changed runs again; one that passed counts as it did."""
    cell("say '7 passed' 0", "say '2 failed' 1", "say '3 passed' 0", "say '4 passed' 0")
    (tmp_path / "tests-torch210-smoke-2.log").write_text("= 1 passed in 2s =\nand then the machine stopped")
    (tmp_path / "ran").unlink()
    assert (
        cell("say '7 passed' 0", "say '2 passed' 0", "say '3 passed' 0", "say '4 passed' 0", resume=True) == "16 passed"
    )
    assert (tmp_path / "ran").read_text().splitlines() == ["2 passed", "3 passed"]
    (tmp_path / "ran").unlink()
    assert cell("say '7 passed' 0") == "7 passed"
    assert (tmp_path / "ran").read_text() == "7 passed\n", "without the option all runs"


def test_the_parts_are_all_files(matrix: ModuleType) -> None:
    """Each file of tests is in one part of one column."""
    parts = [name for check in ("emulator", "unit") for command in matrix.CHECKS[check] for name in command.split()[4:]]
    assert sorted(parts) == sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py"))
