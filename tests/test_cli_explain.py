"""`npugraph-ex explain script.py`: the script runs as it would, and what was compiled is told after it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Command = Callable[..., subprocess.CompletedProcess[str]]

SCRIPT = """
import sys
import torch, torch_npu, npugraph_ex

@torch.compile(backend="npugraph_ex")
def step(x, cache):
    cache.add_(x)
    return x.relu() * 2

cache = torch.zeros(8, device="npu")
for _ in range(int(sys.argv[1])):
    step(torch.ones(8, device="npu"), cache)
print("sum", cache.sum().item())
sys.exit(int(sys.argv[2]))
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    """A program that compiles one graph, prints, and ends with the status it is given."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return str(path)


def test_tables_follow_the_scripts_output(command: Command, script: str) -> None:
    """The script prints first; then its graph, inputs, passes and captures; its exit status is passed on."""
    done = command("explain", "--emulate", script, "3", "4", NPU_EMULATOR_FORCE="1")
    assert done.returncode == 4, done.stderr
    said = done.stdout
    assert said.index("sum 24.0") < said.index("graph 1")
    for words in ("captured graphs, replayed", "L['cache']", "in place", "reinplace_inputs", "the first call"):
        assert words in said


def test_json_is_all_of_stdout(command: Command, script: str, tmp_path: Path) -> None:
    """With --json stdout is one JSON object; what the script prints goes to stderr. SARIF has a file of its own."""
    sarif = tmp_path / "streams.sarif"
    options = ("--json", "--emulate", "--sarif", str(sarif))
    done = command("explain", *options, script, "2", "0", NPU_EMULATOR_FORCE="1")
    assert done.returncode == 0, done.stderr
    (graph,) = json.loads(done.stdout)["graphs"]
    assert graph["graph"]["fate"] == "captured"
    assert len(graph["captures"]) == 1
    assert graph["pool_bytes"] > 0
    assert "sum 16.0" in done.stderr
    assert json.loads(sarif.read_text())["runs"][0]["results"] == []


def test_a_failing_script_is_explained_too(command: Command, tmp_path: Path) -> None:
    """An exception still shows its traceback, after what was compiled before it."""
    path = tmp_path / "fails.py"
    path.write_text(SCRIPT.replace("sys.exit(int(sys.argv[2]))", "raise ValueError('on purpose')"))
    done = command("explain", "--emulate", str(path), "1", NPU_EMULATOR_FORCE="1")
    assert done.returncode == 1
    assert "the first call" in done.stdout
    assert "on purpose" in done.stderr


def test_a_script_that_compiles_nothing(command: Command, tmp_path: Path) -> None:
    """Then that is what is said."""
    path = tmp_path / "plain.py"
    path.write_text("print('hello')\n")
    done = command("explain", "--emulate", str(path), NPU_EMULATOR_FORCE="1")
    assert done.returncode == 0, done.stderr
    assert "Nothing was compiled" in done.stdout


def test_bundled_is_refused(command: Command, script: str) -> None:
    """torch_npu's own backend keeps no such record; one sentence says so."""
    done = command("explain", "--emulate", script, "1", "0", NPUGRAPH_EX="bundled")
    assert done.returncode == 2
    assert "unset it" in done.stderr


def test_a_missing_folder_is_told_before_the_run(command: Command, script: str, tmp_path: Path) -> None:
    """A long run is not lost for a report that cannot be written."""
    done = command("explain", "--emulate", "--sarif", str(tmp_path / "none" / "found.sarif"), script, "1", "0")
    assert (done.returncode, done.stdout) == (2, "")
    assert "there is no folder" in done.stderr
