"""What a release needs: one version, fragments that towncrier reads, a shell that completes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import yaml

from npugraph_ex import __version__

ROOT = Path(__file__).parents[1]


def test_the_version_is_the_same_everywhere() -> None:
    """The citation file has the version of the package, and the changelog begins with it or with an older one."""
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["version"] == __version__
    released = re.findall(r"^## (\d+\.\d+\.\d+) ", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert released[0] == __version__


def test_towncrier_reads_every_fragment() -> None:
    """`<issue>.<kind>.<number>.md`: a word in the place of the number stops the build of the changelog."""
    names = {path.name for path in (ROOT / "changelog.d").glob("*.md")} - {"README.md"}
    assert [name for name in names if not re.fullmatch(r"\d+\.(added|changed|fixed|removed)(\.\d+)?\.md", name)] == []


def test_a_shell_completes_a_command(tmp_path: Path) -> None:
    """As the function that register-python-argcomplete prints asks."""
    asked = {"_ARGCOMPLETE": "1", "COMP_LINE": "npugraph-ex expl", "COMP_POINT": "16", "_ARGCOMPLETE_IFS": " "}
    asked["_ARGCOMPLETE_STDOUT_FILENAME"] = str(tmp_path / "found")
    command = [sys.executable, "-c", "from npugraph_ex.cli import main; main()"]
    subprocess.run(command, env={**os.environ, **asked}, check=True, capture_output=True, timeout=300)
    assert (tmp_path / "found").read_text(encoding="utf-8").split() == ["explain"]
