"""What a page prints, as blocks: for tests that run them as a reader would, and compare the output that the page shows.

Comments directly above a block say what it is:

| comment | the block |
|---|---|
| `<!-- not run: REASON -->` | is not run |
| `<!-- run by tests/test_<name>.py: REASON -->` | is run by another test |
| `<!-- decoder.py -->` | is a file, which is saved |
| `<!-- given: CODE -->` | is run after CODE, which stands for what the reader has: a model, its inputs, a file |
| `<!-- prints -->` | is what the block before it prints |
| `<!-- drawing -->` | is a picture |

In printed output a line `...` stands for any lines, and one address or side stream is as good as another.
"""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_COMMENT = r"<!-- (?:(?!-->).)*-->\n"
_BLOCK = re.compile(
    rf"(?P<above>(?:^ *{_COMMENT})*)^(?P<indent> *)```(?P<language>\w+)\n(?P<code>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
TABLE = re.compile(r"<!-- table of (\w+).*?<!-- end of the table of \1 -->", re.DOTALL)
_COMMAND = re.compile(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """One fenced block: its language, its text, and what the comments above it say.

    Attributes:
        reason: why it is not run, or not here; empty if it is.
        file: the file that it is saved as; empty if it is none.
        given: code that is run before it.
        prints: it is what the block before it prints.
        drawing: it is a picture.
    """

    language: str
    code: str
    reason: str = ""
    file: str = ""
    given: str = ""
    prints: bool = False
    drawing: bool = False

    @property
    def commands(self) -> list[tuple[str, str | None]]:
        """Each command of a console or shell, without its remark, and what the page shows of its output if it shows any."""
        if self.language == "console":
            return list(_COMMAND.findall(self.code))
        lines = self.code.replace("\\\n", " ").splitlines() if self.language in {"bash", "shell"} else []
        return [(re.sub(r"\s+#.*", "", line), None) for line in lines if line.strip()]


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page in order; not those of tables that a program writes."""
    return list(_blocks(TABLE.sub("", page.read_text(encoding="utf-8"))))


def _blocks(text: str) -> Iterator[Block]:
    for found in _BLOCK.finditer(text):
        reason = file = given = ""
        prints = drawing = False
        for said in re.findall(r"<!-- ((?:(?!-->).)*?)\s*-->", found["above"], re.DOTALL):
            if said.startswith(("not run: ", "run by ")):
                reason = said.removeprefix("not run: ")
            elif said.startswith("given:"):
                given = said.removeprefix("given:").strip()
            elif re.fullmatch(r"[\w/-]+\.\w+", said):
                file = said
            prints, drawing = prints or said == "prints", drawing or said == "drawing"
        yield Block(found["language"], textwrap.dedent(found["code"]), reason, file, given, prints, drawing)


def agree(printed: str, output: str) -> bool:
    """Whether an output is the one that a page shows. How many streams torch_npu itself keeps differs between its releases.

    A first line of dots stands for what a launcher may say before the program does.
    """
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    expected, got = (
        re.sub(r"\b(0x|stream |in use now: )[1-9a-f][0-9a-f]*", r"\1...", text) for text in (printed, output)
    )
    return doctest.OutputChecker().check_output(re.sub(r"^\.\.\.\n", "...", expected), got, options)


def bash(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a line of shell with this interpreter's scripts first on the path; the launcher's greeting is left out."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    # The settings of these tests' own device are not the reader's; only the compiled runtime is shared.
    ours = {name for name in os.environ if name.startswith("NPU_EMULATOR") and name != "NPU_EMULATOR_CACHE"}
    variables = {name: value for name, value in os.environ.items() if name not in ours}
    # As at a terminal, what a program prints first stands first, also before an error.
    variables |= {"PATH": path, "NPU_EMULATOR_FORCE": "1", "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(
        ["/usr/bin/env", "bash", "-c", command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        check=False, cwd=folder, env=variables, timeout=900,
    )  # fmt: skip
    done.stdout = re.sub(r"^npu_emulator: .*\n", "", done.stdout, flags=re.MULTILINE)
    return done
