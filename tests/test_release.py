"""What a release needs: one version, fragments that towncrier reads, a shell that completes."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from npugraph_ex import __version__
from npugraph_ex.observe.explain import GraphExplanation
from npugraph_ex.report.graphs import GraphRecord
from npugraph_ex.report.passes import PassReport

ROOT = Path(__file__).parents[1]
ISSUES = range(1, 26)
"""The issues that exist; a new one comes here with its first fragment."""


def test_the_version_is_the_same_everywhere() -> None:
    """The citation file has the version of the package, and the changelog begins with it or with an older one."""
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["version"] == __version__
    released = re.findall(r"^## (\d+\.\d+\.\d+) ", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert released[0] == __version__
    assert len(set(released)) == len(released), "a version has one section"


def test_no_two_files_that_are_shipped_are_equal() -> None:
    """`check-wheel-contents`, which the page on releases runs, takes equal files for a mistake (W002)."""
    shipped = [
        path
        for name in ("npugraph_ex", "npu_emulator")
        for path in (ROOT / name).rglob("*.py*")
        if path.suffix != ".pyc"
    ]
    named: dict[bytes, list[str]] = {}
    for path in shipped:
        named.setdefault(path.read_bytes(), []).append(str(path.relative_to(ROOT)))
    assert [names for names in named.values() if len(names) > 1] == []


def test_towncrier_reads_every_fragment() -> None:
    """`<issue>.<kind>.<number>.md`: a word in the place of the number stops the build of the changelog."""
    names = {path.name for path in (ROOT / "changelog.d").iterdir()} - {"README.md"}
    pattern = re.compile(r"(\d+)\.(?:added|changed|fixed|removed)(?:\.\d+)?\.md")
    assert [name for name in names if not (found := pattern.fullmatch(name)) or int(found[1]) not in ISSUES] == []
    released = re.findall(r"\(#(\d+)\)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert released
    assert {int(issue) for issue in released} <= set(ISSUES)


def test_a_second_build_of_a_version_joins_its_section() -> None:
    """A title has a date, so towncrier wrote two sections of one version where days lay between two builds."""
    joined = runpy.run_path(str(ROOT / ".ci" / "changelog.py"))["joined"]
    start = "# Changelog\n\n<!-- towncrier release notes start -->\n"
    one = "\n## 1.0.0 (2026-01-01)\n\n### Added\n\n- First,\n  and more.\n- Second. (#2)\n- Third. (#4)\n"
    more = "## 1.0.0 (2026-02-02)\n\n### Added\n\n- Between. (#3)\n\n### Fixed\n\n- A fault. (#1)\n\n\n"
    assert joined(start, one) == start + one
    both = (
        one.replace("01-01", "02-02").replace("- Third", "- Between. (#3)\n- Third")
        + "\n### Fixed\n\n- A fault. (#1)\n"
    )
    assert joined(start + one, more) == start + both
    later = more.replace("1.0.0", "1.1.0")
    assert joined(start + one, later) == f"{start}\n{later.rstrip()}\n{one}"


def test_what_is_deprecated_names_its_replacement_and_goes_in_time() -> None:
    """Each mark says "NAME goes in 0.3; use OTHER", and none is left when that release comes; the first use warns."""
    sources = [
        path.read_text(encoding="utf-8")
        for name in ("npugraph_ex", "npu_emulator")
        for path in (ROOT / name).rglob("*.py")
    ]
    messages = [message for source in sources for message in re.findall(r"@deprecated\((\".*\")\)\n", source)]
    assert messages
    now = tuple(map(int, __version__.split(".")[:2]))
    for message in messages:
        release = re.fullmatch(r'"\S+ goes in (\d+)\.(\d+); use .+\."', message)
        assert release, message
        assert (int(release[1]), int(release[2])) > now, f"0.{release[2]} is here: delete what {message} is about"
    graph = GraphExplanation(GraphRecord(1, "captured", (), PassReport(), 1, 1), (), None)
    with pytest.warns(DeprecationWarning, match="goes in") as warned:
        assert graph.text() == str(graph.section())
    assert warned[0].filename == __file__


@pytest.mark.slow
def test_a_shell_completes_a_command(tmp_path: Path) -> None:
    """As the function that register-python-argcomplete prints asks."""
    asked = {"_ARGCOMPLETE": "1", "COMP_LINE": "npugraph-ex expl", "COMP_POINT": "16", "_ARGCOMPLETE_IFS": " "}
    asked["_ARGCOMPLETE_STDOUT_FILENAME"] = str(tmp_path / "found")
    command = [sys.executable, "-c", "from npugraph_ex.cli import main; main()"]
    subprocess.run(command, env={**os.environ, **asked}, check=True, capture_output=True, timeout=300)
    assert (tmp_path / "found").read_text(encoding="utf-8").split() == ["explain"]
