"""The size table that CI prints: a package that outgrows its budget fails it, and so does one without a budget."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "size.py"


def _sizes(root: Path, budget: str) -> subprocess.CompletedProcess[str]:
    (root / ".ci" / "size.toml").write_text(f"[lines]\n{budget}\n", encoding="utf-8")
    command = [sys.executable, str(root / ".ci" / "size.py")]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with five lines of Python and three of C++ in one package, and a file that git does not keep."""
    package = tmp_path / "npu_emulator" / "runtime" / "deep"
    package.mkdir(parents=True)
    (package / "a.py").write_text("x = 1\n" * 5, encoding="utf-8")
    (package / "b.cpp").write_text("int x;\n" * 3, encoding="utf-8")
    (tmp_path / ".ci").mkdir()
    shutil.copy(SCRIPT, tmp_path / ".ci" / "size.py")
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)  # noqa: S607
    subprocess.run(["git", "-C", str(tmp_path), "add", "npu_emulator"], check=True)  # noqa: S607
    (package / "generated.py").write_text("x = 1\n" * 100, encoding="utf-8")
    return tmp_path


def test_lines_are_counted_by_package_and_kind(root: Path) -> None:
    """What git keeps counts, for the package that the file is in however deep it lies."""
    done = _sizes(root, '"npu_emulator/runtime" = 8')
    assert (done.returncode, done.stderr.strip()) == (0, "")
    heads, row, all_ = (line.split() for line in done.stdout.splitlines())
    assert dict(zip(heads[1:], row[1:], strict=True)) == {
        "pages": "0",
        "Python": "5",
        "C++": "3",
        "all": "8",
        "budget": "8",
    }
    assert all_[1:] == row[1:]


@pytest.mark.parametrize(
    ("budget", "said"),
    [
        ('"npu_emulator/runtime" = 7', ("npu_emulator/runtime", "8", "7")),
        ("other = 7", ("npu_emulator/runtime", "no budget")),
        ('"npu_emulator/runtime" = 8\nother = 7', ("other", "no files")),
    ],
)
def test_growth_is_a_decision(root: Path, budget: str, said: tuple[str, ...]) -> None:
    """Too many lines, a new package, and a budget that is left over each fail, and the message names the package."""
    done = _sizes(root, budget)
    assert done.returncode == 1
    assert all(word in done.stderr for word in said), done.stderr


def test_every_package_is_within_its_budget() -> None:
    """The repository itself; `.ci/size.toml` is where a budget is raised."""
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
