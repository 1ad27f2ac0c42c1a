"""The tutorial prints what happens: its files are saved and its commands run in order, and the output is compared."""

from __future__ import annotations

from pathlib import Path

from printed import blocks, follow

DOCS = Path(__file__).parents[1] / "docs"


def test_the_tutorial_runs_as_printed(tmp_path: Path) -> None:
    """Each Python block is a file, so that none escapes; five commands print what the page shows."""
    page = DOCS / "tutorial.md"
    assert all(block.file or block.language == "console" for block in blocks(page))
    assert follow(page, tmp_path) == 5
