"""What the READMEs print works: their blocks are run as printed, in the order in which a reader would run them.

A block under the comment `<!-- not run: reason -->` is not run; the reason is part of the file and is never empty.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import printed
import pytest
from printed import Block

ROOT = Path(__file__).parents[1]
READMES = ["README.md", "README.zh.md"]


def blocks(readme: str) -> list[Block]:
    """Return the fenced blocks of a file in order."""
    return printed.blocks(ROOT / readme)


def test_the_extraction_sees_every_fence() -> None:
    """No block escapes: as many are found as the files have pairs of fences, and each has a language."""
    for readme in READMES:
        fences = re.findall(r"^```", (ROOT / readme).read_text(encoding="utf-8"), re.MULTILINE)
        assert len(blocks(readme)) * 2 == len(fences), readme


def test_both_languages_print_the_same_code() -> None:
    """The Chinese README shows the code of the English one, comments of shell lines apart."""

    def code(readme: str) -> list[str]:
        return [re.sub(r" +#.*", "", block.code) for block in blocks(readme)]

    assert code("README.md") == code("README.zh.md")


def test_every_tox_environment_that_is_named_exists() -> None:
    """Each `tox -e name` in the READMEs is an environment of tox.ini."""
    tox = ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini")
    for readme in READMES:
        named = set(re.findall(r"tox -e (\w+)", (ROOT / readme).read_text(encoding="utf-8")))
        assert {"emulated", "tests", "npu", "docs"} <= named
        assert all(tox.has_section(f"testenv:{name}") for name in named), named


def test_blocks_run_as_printed(tmp_path: Path) -> None:
    """Python blocks run on the emulated device; the shell block after the first finds it saved as script.py.

    The Chinese README prints the same code, as tested above.
    """
    saved = tmp_path / "script.py"
    for number, block in enumerate(blocks("README.md")):
        if block.reason:
            continue
        if block.language == "python":
            file = tmp_path / f"block_{number}.py" if saved.exists() else saved
            file.write_text(block.code, encoding="utf-8")
            _succeeds([sys.executable, "-m", "npu_emulator", str(file)], tmp_path)
        elif block.language == "bash":
            _succeeds(["bash", "-euo", "pipefail", "-c", block.code], tmp_path)
        else:
            pytest.fail(f"README.md has a block in {block.language!r}, which nobody runs; give it a reason not to be")


def _succeeds(command: list[str], folder: Path) -> None:
    """Run a command with this interpreter's scripts first on the path, and show its output if it fails."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    variables = {**os.environ, "PATH": path}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env=variables, timeout=900)
    assert done.returncode == 0, f"{command[-1]}\n{done.stdout}\n{done.stderr}"
