"""A run of the suite is the same run whoever does it: in one process or several, at once or after a kill."""

from __future__ import annotations

import json
import subprocess
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from interpreter import PYTHON

from npugraph_ex.versions import stream_methods

ROOT = Path(__file__).parents[2]
SOME = (
    "conformance/npugraph_ex_conformance/tests/test_capture.py",
    "conformance/npugraph_ex_conformance/tests/test_streams.py",
    "-k",
    "one_pool or (every_form and native)",
)
"""Of one test ten examples, of four one each; the first test takes longest, so that two processes end them in another order."""


def _suite(*options: str) -> subprocess.CompletedProcess[str]:
    command = [*PYTHON, "-m", "pytest", "-p", "no:cacheprovider", *options]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)


def _lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a file of the report folder, without their times."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


def _cut(path: Path, lines: int) -> None:
    """Leave what a killed process leaves: some lines, and the beginning of another."""
    text = path.read_text(encoding="utf-8").splitlines(keepends=True)
    assert len(text) > lines
    path.write_text("".join(text[:lines]) + text[lines][:20], encoding="utf-8")


@pytest.mark.skipif(stream_methods.DIFFERENCE.older, reason=stream_methods.DIFFERENCE.what)
def test_a_killed_run_of_two_processes_ends_in_one_as_it_would_have(tmp_path: Path) -> None:
    """The files agree to the byte apart from times; what passed before the kill did not run again."""
    first = _suite(*SOME, "-n2", f"--report-dir={tmp_path}")
    assert first.returncode == 0, first.stdout[-2000:]
    whole = {name: _lines(tmp_path / name) for name in ("cases.jsonl", "tests.jsonl")}
    assert len(whole["cases.jsonl"]) == 14
    assert [line["test"] for line in whole["cases.jsonl"]] == sorted(line["test"] for line in whole["cases.jsonl"])
    _cut(tmp_path / "cases.jsonl", 12)
    _cut(tmp_path / "tests.jsonl", 2)
    second = _suite(*SOME, "--resume", f"--report-dir={tmp_path}")
    assert second.returncode == 0, second.stdout[-2000:]
    assert "1 test passed before, not run again" in second.stdout
    assert {name: _lines(tmp_path / name) for name in whole} == whole
    assert len(ET.parse(tmp_path / "junit.xml").findall(".//testcase")) == 5  # noqa: S314 - our own file
