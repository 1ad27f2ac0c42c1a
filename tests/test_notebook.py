"""Jupyter: the cells of the page run in a kernel, and objects show themselves as HTML below their cells."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from printed import blocks

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

PAGE = Path(__file__).parents[1] / "docs" / "how-to" / "notebooks.md"


@pytest.mark.filterwarnings("ignore:.*zmq:RuntimeWarning")
def test_the_page_runs_in_a_kernel(tmp_path: Path, fresh_environment: Callable[..., dict[str, str]]) -> None:
    """The emulated device from the first cell, an explanation and a timeline as pages in frames, a report as a table."""
    cells = [nbformat.v4.new_code_cell(block.code) for block in blocks(PAGE)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    client = nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute(env=fresh_environment(NPU_EMULATOR_FORCE="1"))
    shown = [
        [output["data"] for output in cell["outputs"] if output["output_type"] == "execute_result"] for cell in cells
    ]
    assert [len(outputs) for outputs in shown] == [0, 1, 1, 1, 1, 1, 1]
    explanation, report, streams, timeline, validation = (outputs[0]["text/html"] for outputs in shown[1:6])
    assert explanation.startswith('<iframe title="Explanation" srcdoc="&lt;!doctype html&gt;')
    assert "aten.relu" in explanation
    assert "<td>scope_lowering" in report
    assert streams == "Streams: nothing was found."
    assert "Modelled, not measured" in timeline
    assert validation.startswith('<iframe title="Validation of __main__.search" srcdoc=')
    assert "&lt;td&gt;5 of 5&lt;/td&gt;" in validation
    assert "Nothing is wrong." in validation
    assert "aten.relu" in (tmp_path / "explained.html").read_text(encoding="utf-8")
