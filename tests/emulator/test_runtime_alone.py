"""The emulated runtime without Python and torch: its C++ tests. `tox -e sanitizers` and `tox -e aarch64` run them in other ways."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_pages_of_64_kib() -> None:
    """All C++ tests pass; memory is given back in pages of the machine's size, and a neighbour on the last page keeps its own."""
    script = Path(__file__).parent / "runtime" / "run.py"
    done = subprocess.run([sys.executable, str(script), "pages"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "graphs_are_captured_and_replayed_side_by_side" in done.stdout
