"""What the READMEs print works: their blocks are run as printed, in the order in which a reader would run them.

A block under the comment `<!-- not run: reason -->` is not run; the reason is part of the file and is never empty.
"""

from __future__ import annotations

import re
from configparser import ConfigParser
from dataclasses import replace
from pathlib import Path

import printed
import pytest
from printed import Block
from reader import Reader

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


@pytest.mark.slow
def test_blocks_run_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, in one folder; the first block of Python is the script that the commands below it run.

    The Chinese README prints the same code, as tested above.
    """
    monkeypatch.setenv("NPUGRAPH_EX_CACHE", str(tmp_path / "cache"))
    reader = Reader(tmp_path)
    for block in blocks("README.md"):
        if block.reason:
            continue
        assert block.language in {"python", "bash"}, "nobody runs such a block; give it a reason not to be run"
        is_script = block.language == "python" and not (tmp_path / "script.py").exists()
        reader.follow(replace(block, file="script.py") if is_script else block)
