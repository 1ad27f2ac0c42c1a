"""A pass of the library that was rolled back is named, with what to do, by `explain` and `advise`: text, page and JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from device_helpers import NPU, compiled
from torch import fx

from npugraph_ex import explain
from npugraph_ex.cli import main
from npugraph_ex.commands.advise import _page, advising
from npugraph_ex.passes import noop_removal

UNDONE = "noop_removal was rolled back: its rewrites are missing, values are right; please report it"
WHY = "GraphVerificationError: "


def _other_shape(graph: fx.Graph) -> None:
    """Lets the graph return another shape than it did."""
    output = graph.output_node()
    with graph.inserting_before(output):
        output.args = ([graph.call_function(torch.ops.aten.sum.default, (value,)) for value in output.args[0]],)  # type: ignore[union-attr]


@pytest.fixture
def spoiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass leaves a broken graph; others use the same function and do not."""
    monkeypatch.setattr(noop_removal, "noops", SimpleNamespace(remove=_other_shape))
    torch.compiler.reset()


def _program(x: torch.Tensor) -> torch.Tensor:
    return x.relu() * 2


@pytest.mark.usefixtures("spoiled")
def test_explain() -> None:
    """In short, in full, as a page and as JSON; the values are right."""
    x = torch.randn(4, 8, device=NPU)
    found = explain(_program, x)
    for said in (str(found.summary()), str(found), found.page().html(), str(found.graphs[0].graph.report)):
        assert UNDONE in " ".join(said.split())
        assert WHY in said
    (record,) = [
        one
        for one in json.loads(found.to_json())["graphs"][0]["graph"]["report"]["passes"]
        if one["outcome"] == "rolled back"
    ]
    assert record["name"] == "noop_removal"
    assert record["message"].startswith(WHY)
    assert torch.equal(compiled(_program)(x), _program(x))


@pytest.mark.usefixtures("spoiled")
def test_advice() -> None:
    """It does not say that there is nothing to win; a pass that both compilations undo is named once."""
    with torch.no_grad(), advising() as found:
        compiled(_program)(torch.randn(4, 8, device=NPU))
    page = _page("s.py", found)
    for said in (str(page), page.html()):
        assert UNDONE in " ".join(said.split())
        assert "nothing to win" not in said
    assert str(page).count("noop_removal was rolled back") == 1
    assert "Passes that were rolled back, so that what they win is missing: 1." in str(page)


@pytest.mark.usefixtures("spoiled")
def test_json_of_advice(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Graph, pass and reason."""
    script = tmp_path / "program.py"
    script.write_text("import torch\ntorch.compile(torch.relu, backend='npugraph_ex')(torch.ones(4, device='npu'))\n")
    for variable in ("argv", "path"):
        monkeypatch.setattr(sys, variable, list(getattr(sys, variable)))
    assert main(["advise", "--json", str(script)]) == 0
    (undone,) = json.loads(capsys.readouterr().out)["rolled_back"]
    assert undone["pass"] == "noop_removal"  # noqa: S105 - a pass over a graph
    assert undone["why"].startswith(WHY)
    assert undone["graph"] > 0


def test_nothing_is_said_of_passes_that_stay() -> None:
    """Of the program as it is."""
    x = torch.randn(4, 8, device=NPU)
    with torch.no_grad(), advising() as found:
        said = str(explain(_program, x).summary())
    assert found.undone == []
    assert "rolled back" not in said + str(_page("s.py", found))
