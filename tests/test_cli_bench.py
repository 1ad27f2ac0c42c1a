"""`npugraph-ex bench`: every topic is a file that is there, mistakes are one sentence, and two runs compare."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

from npugraph_ex.commands import bench

Command = Callable[..., subprocess.CompletedProcess[str]]


def test_every_topic_is_a_file_and_in_the_help(command: Command) -> None:
    """No topic without a bench, no bench without a topic; `--help` names them all."""
    files = {path.name for path in bench.benches_folder().glob("test_*.py")}
    assert files == set(bench.TOPICS.values())
    done = command("bench", "--help")
    assert done.returncode == 0
    assert all(f"  {topic} " in done.stdout for topic in bench.TOPICS)


def test_a_wrong_topic_is_named(command: Command) -> None:
    """The message has the word that is wrong and the right ones."""
    done = command("bench", "calls")
    assert done.returncode == 1
    assert "'calls'" in done.stderr
    assert "compile" in done.stderr


def test_tables_are_compared_row_by_row(tmp_path: Path) -> None:
    """Rows are found again by what they name, wherever they stand; a figure tells how many times the earlier one it is."""
    import sys

    sys.path.insert(0, str(bench.benches_folder()))
    try:
        from tables import Saved
    finally:
        sys.path.pop(0)
    earlier = Saved({"torch": "1"}, {"cost": [{"layers": 8, "us": 10.0}, {"layers": 2, "us": 4.0}]})
    earlier.write(tmp_path / "earlier.json")
    now = Saved({"torch": "2"}, {"cost": [{"layers": 2, "us": 5.0}, {"layers": 64, "us": 7.0}]})
    said = now.beside(Saved.read(tmp_path / "earlier.json"))
    assert "5.00 (1.25)" in said
    assert "7.00" in said
    assert "7.00 (" not in said
    assert json.loads((tmp_path / "earlier.json").read_text(encoding="utf-8"))["about"] == {"torch": "1"}
    assert "|        2 |" in now.page()
