"""`npugraph-ex timeline`: runs a script, writes a picture and a trace, and says what they come to."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from npugraph_ex import cli
from npugraph_ex.report.graphs import graph_records, graphs_so_far

_SCRIPT = """
import torch
x = torch.zeros(1 << 16, device="npu")
side = torch.npu.Stream()
side.wait_stream(torch.npu.current_stream())
with torch.npu.stream(side):
    y = x + 1
z = x * 2
torch.npu.current_stream().wait_stream(side)
w = y + z
{end}
"""


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command becomes the script; afterwards the tests' own arguments and path are back."""
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_devices_are_refused_with_the_way_to_draw_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    """Torchrun starts the command for each rank; the files are merged."""
    assert cli.main(["timeline", "--devices", "2", "model.py"]) == 2
    assert re.search(r"torch\.distributed\.run.*merge_timelines", capsys.readouterr().err)


def test_both_files_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The page shows the script's kernels, the trace has them as spans and the events as arrows."""
    script = tmp_path / "model.py"
    script.write_text(_SCRIPT.format(end=""))
    assert cli.main(["timeline", "--output", str(tmp_path / "new" / "folder"), str(script)]) == 0
    said = capsys.readouterr().out
    assert "speed-up" in said
    assert "critical path" in said
    page = (tmp_path / "new" / "folder" / "model.timeline.html").read_text()
    assert page.count('title="aten.') == 4
    rows = json.loads((tmp_path / "new" / "folder" / "model.trace.json").read_text())["traceEvents"]
    assert sum(row["ph"] == "X" for row in rows) == 4
    assert sum(row["ph"] == "s" for row in rows) == 2


def test_ranks_write_files_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torchrun gives all ranks one folder; a program of one rank has the usual names."""
    script = tmp_path / "model.py"
    script.write_text(_SCRIPT.format(end=""))
    monkeypatch.chdir(tmp_path)  # where what the second rank would print is written
    for rank, world in ((0, 2), (1, 2), (0, 1)):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(world))
        assert cli.main(["timeline", "--output", str(tmp_path), str(script)]) == 0
    written = {file.name for file in tmp_path.iterdir() if file != script}
    names = ("model", "model.rank0", "model.rank1")
    pictures = {f"{name}.{kind}" for name in names for kind in ("timeline.html", "trace.json")}
    assert written == {*pictures, "model.rank1.timeline.txt"}  # the last has what that rank would print


def test_a_script_that_does_nothing_on_the_device_is_told_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The picture is empty, and a line says why; that is no failure."""
    script = tmp_path / "model.py"
    script.write_text("print('nothing')\n")
    assert cli.main(["timeline", "--output", str(tmp_path), str(script)]) == 0
    assert "picture is empty" in capsys.readouterr().out


@pytest.mark.slow
def test_each_captured_graph_says_what_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One of the script's own has no words; those of this library say which compiled graph they are of, and both reasons."""
    script = tmp_path / "model.py"
    script.write_text(
        "import torch, torch_npu\nx, graph = torch.ones(4, device='npu'), torch.npu.NPUGraph()\n"
        "with torch.npu.graph(graph):\n    x + 1\ngraph.replay()\n"
        "@torch.compile(backend='npugraph_ex', dynamic=False)\ndef step(x, n):\n    x.add_(n)\n"
        "for x, n in ((x, 2), (x.clone(), 2), (x, 3)):\n    step(x, n)\n"
    )
    before = graphs_so_far()
    assert cli.main(["timeline", "--output", str(tmp_path), str(script)]) == 0
    lines = capsys.readouterr().out.partition("critical path")[0].splitlines()[2:]
    numbers = [int(line.partition(":")[0].removeprefix("graph ")) for line in lines if line[0] != " "]
    assert numbers == list(range(numbers[0], numbers[0] + 4))  # those of the process
    one, two = (
        f"  graph {record.number} of `explain` (step, model.py:8), compiled" for record in graph_records(after=before)
    )
    assert (lines[2], lines[4]) == (
        f"{one} for the first call; captured because of the first call",
        f"{one} for the first call; captured because of a new address of L['x']",
    )
    assert lines[6].startswith(f"{two} again: n == 2 was true and is not now (used at ")
    page = (tmp_path / "model.timeline.html").read_text()
    assert "captured because of a new address of" in page
    assert f"graph {numbers[1]}, lane 0: step, model.py:8 <small>" in page
    assert f"graph {numbers[0]}, lane 0 <small>" in page  # the program's own, of no function


def test_a_graph_has_the_name_of_the_function_that_was_compiled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not of one that it calls, also where a session compiles it."""
    script = tmp_path / "model.py"
    script.write_text(
        "import torch, torch_npu, npugraph_ex\ndef inner(x):\n    return x.relu()\n"
        "def step(x):\n    return inner(inner(x))\n"
        "class Model(torch.nn.Module):\n    def forward(self, x):\n        return step(x) + 1\n"
        "x = torch.ones(4, device='npu')\ntorch.compile(step, backend='npugraph_ex')(x)\n"
        "with torch.no_grad():\n    npugraph_ex.inference.session(Model(), (x,))(x)\n"
    )
    before = graphs_so_far()
    assert cli.main(["timeline", "--output", str(tmp_path), str(script)]) == 0
    named = re.findall(r"^  graph \d+ of `explain` \((.*)\), compiled", capsys.readouterr().out, re.MULTILINE)
    assert list(dict.fromkeys(named)) == ["step, model.py:5", "forward, model.py:8"]
    assert [record.place for record in graph_records(after=before)] == [f"{script}:5", f"{script}:8"]


def test_a_script_that_fails_is_drawn_up_to_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its traceback is shown, the status is 1, and the files are there."""
    script = tmp_path / "model.py"
    script.write_text(_SCRIPT.format(end="raise RuntimeError('too far')"))
    assert cli.main(["timeline", "--output", str(tmp_path), str(script)]) == 1
    assert "too far" in capsys.readouterr().err
    assert (tmp_path / "model.timeline.html").read_text().count('title="aten.') == 4


def test_a_script_that_is_no_python_is_not_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The line and the error, status 1, and no picture of nothing."""
    script = tmp_path / "model.py"
    script.write_text("x = (1,\ny = 2\n")
    assert cli.main(["timeline", "--output", str(tmp_path / "drawn"), str(script)]) == 1
    said = capsys.readouterr()
    assert said.err.splitlines()[0] == f'  File "{script}", line 1'
    assert said.err.splitlines()[-1] == "SyntaxError: '(' was never closed"
    assert said.out == ""
    assert not (tmp_path / "drawn").exists()


def test_a_missing_script_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As for every command that runs a script."""
    assert cli.main(["timeline", str(tmp_path / "none.py")]) == 2
    assert "there is no file" in capsys.readouterr().err
