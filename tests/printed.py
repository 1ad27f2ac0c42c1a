"""What a page prints, as blocks: for tests that run them as a reader would, and compare the output that the page shows."""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

_BLOCK = re.compile(
    r"(?:<!-- (?:not run: (?P<reason>.*?)|(?P<file>[\w/.-]+)) -->\n)?^```(?P<language>\w+)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_COMMAND = re.compile(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """One fenced block: its language, its text, why it is not run (empty if it is), and the file that it is saved as."""

    language: str
    code: str
    reason: str
    file: str


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page in order."""
    found = _BLOCK.finditer(page.read_text(encoding="utf-8"))
    return [Block(block["language"], block["code"], block["reason"] or "", block["file"] or "") for block in found]


def follow(page: Path, folder: Path) -> int:
    """Do what a page says: save its files into the folder, and run each command of its consoles there.

    A line `...` of the printed output stands for any lines.

    Returns:
        The number of commands.
    """
    commands = 0
    for block in blocks(page):
        if block.file and not block.reason:
            (folder / block.file).parent.mkdir(parents=True, exist_ok=True)
            (folder / block.file).write_text(block.code, encoding="utf-8")
        elif block.language == "console" and not block.reason:
            for command, printed in _COMMAND.findall(block.code):
                commands += 1
                done = bash(command, folder)
                options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
                assert doctest.OutputChecker().check_output(printed, done.stdout, options), f"{command}\n{done.stdout}"
    return commands


def bash(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a line of shell with this interpreter's scripts first on the path; the launcher's greeting is left out."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    # The settings of these tests' own device are not the reader's; only the compiled runtime is shared.
    ours = {name for name in os.environ if name.startswith("NPU_EMULATOR") and name != "NPU_EMULATOR_CACHE"}
    variables = {name: value for name, value in os.environ.items() if name not in ours}
    variables |= {"PATH": path, "NPU_EMULATOR_FORCE": "1"}
    done = subprocess.run(
        ["/usr/bin/env", "bash", "-c", command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        check=False, cwd=folder, env=variables, timeout=900,
    )  # fmt: skip
    done.stdout = re.sub(r"^(npu_emulator: |Warning : ASCEND_HOME_PATH).*\n", "", done.stdout, flags=re.MULTILINE)
    return done
