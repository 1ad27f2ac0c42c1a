"""Parts of pages that every build writes from the code: the options, and the commands as their own `--help` shows them."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import phrases

from npu_emulator.__main__ import command_line
from npugraph_ex.cli import _parser
from npugraph_ex.commands import public_names
from npugraph_ex.commands.terminal import parsers_in
from npugraph_ex.config import OPTION_TABLE


def options() -> Iterator[str]:
    """A section for each option: a table of sentences is wider than a screen, and a section can be linked."""
    for row in OPTION_TABLE.values():
        only = f" This version does `{row.default!r}` alone." if row.honoured == (row.default,) else ""
        yield f"## {row.name}\n\n{row.meaning}\n\nDefault: `{row.default!r}`. Takes: {row.kind.allowed}.{only}\n"


def commands() -> Iterator[str]:
    """A section for each command and subcommand.

    sphinx-argparse reads descriptions as reStructuredText, under which the lists of examples in these are broken markup.
    """
    width = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "100"  # as argparse asks for the terminal's
    try:
        for parser in (*parsers_in(_parser()), command_line()):
            parser.color = False  # since Python 3.14, if a terminal runs the build
            yield f"## {parser.prog}\n\n```{{code-block}} text\n:class: wrapped\n\n{parser.format_help().rstrip()}\n```\n"
    finally:
        if width is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = width


def index_codes(_app, name, source):  # noqa: ANN001, ANN201 - Sphinx's hook
    """Make each code of the device an entry of the index: the search ignores a number that stands in a text."""
    if name == "reference/emulator-codes":
        entries = "\n".join(f"   single: {code}" for code in re.findall(r"^\| (\d+) `", source[0], re.MULTILINE))
        source[0] += f"\n```{{eval-rst}}\n.. index::\n{entries}\n```\n"


def name_files(_app, _name, source):  # noqa: ANN001, ANN201 - Sphinx's hook
    """Show the name of a file above it: on the page it is a comment, which a reader of the site does not see."""
    source[0] = re.sub(
        r"^<!-- ([\w/-]+\.\w+) -->\n```(\w+)\n",
        r"```{code-block} \2\n:caption: `\1`\n\n",
        source[0],
        flags=re.MULTILINE,
    )


def methods(name: str) -> list[str]:
    """The class of that name, and its public methods and properties."""
    module, _, last = name.rpartition(".")
    return [last, *public_names.methods(module, last)]


def write(folder: Path) -> None:
    """Write every part into the folder."""
    folder.mkdir(exist_ok=True)
    measured = (Path(__file__).parent / "reference" / "speed-tables.md").read_text(encoding="utf-8")
    for page, english in (("options", "\n".join(options())), ("speed", measured)):
        (folder / f"{page}.zh.md").write_text(phrases.of(f"reference/{page}").text(english), encoding="utf-8")
    for name, sections in (("options", options), ("commands", commands)):
        (folder / f"{name}.md").write_text("\n".join(sections()), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
