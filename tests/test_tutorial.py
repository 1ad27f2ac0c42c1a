"""The tutorial prints what happens: its files are saved and its commands run in order, and the output is compared."""

from __future__ import annotations

from pathlib import Path

import pytest
from printed import blocks
from reader import Reader

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.slow
def test_the_tutorial_runs_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each Python block is a file, so that none escapes; five commands print what the page shows."""
    monkeypatch.setenv("NPUGRAPH_EX_CACHE", str(tmp_path / "cache"))
    page = blocks(DOCS / "tutorial.md")
    assert all(block.file or block.language == "console" for block in page)
    assert sum(len(block.commands) for block in page) == 5
    reader = Reader(tmp_path, alone=("explain", "timeline"))
    for block in page:
        reader.follow(block)
