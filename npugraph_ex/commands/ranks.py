"""The rank that torchrun gives this process: each rank writes files of its own, and one of each machine prints.

All ranks have one folder and one stdout. A file of one name would be the last rank's, and JSON values in a row are none.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import StringIO
from pathlib import Path
from typing import TextIO

from npugraph_ex.commands.terminal import say_written


def rank() -> str:
    """The number among several ranks; empty in a program of one."""
    return os.environ.get("RANK", "") if os.environ.get("WORLD_SIZE", "1") != "1" else ""


def prints() -> bool:
    """Whether this is the first rank of its machine, or the only one."""
    return not rank() or os.environ.get("LOCAL_RANK", rank()) == "0"


def own_name(name: str) -> str:
    """The name with the rank behind it, as in ``model.rank1``; as it is if there is one rank."""
    return f"{name}.rank{rank()}" if rank() else name


def give_own_files(arguments: argparse.Namespace, *options: str) -> None:
    """Put the rank into the names of the files that these options have, but not of a pipe, a folder or `/dev/stderr`."""
    for option in options:
        file: Path | None = getattr(arguments, option)
        if file is not None and (file.is_file() or not file.exists()) and file.parts[:2] != ("/", "dev"):
            setattr(arguments, option, file.with_name(f"{own_name(file.stem)}{file.suffix}"))


def unprinted(arguments: argparse.Namespace) -> Path | None:
    """The file that has what a rank would print; None for one that prints."""
    kind = "json" if arguments.json else "txt"
    return None if prints() else Path(f"{own_name(Path(arguments.script).stem)}.{arguments.command}.{kind}")


@contextmanager
def output(arguments: argparse.Namespace, out: TextIO) -> Iterator[TextIO]:
    """Where the command's result goes: ``out``, or for another rank a file in the current folder, which stderr names."""
    file = unprinted(arguments)
    if file is None:
        yield out
        return
    text = StringIO()
    try:
        yield text
    finally:
        file.write_text(text.getvalue().lstrip("\n"), encoding="utf-8")
        say_written(arguments, file)


def started(arguments: argparse.Namespace) -> str:
    """How a command is started here: `npugraph-ex`, or torchrun's own words before the name of this command.

    They are read off the parent process, whose command line ends as this one does.
    """
    name = arguments.command
    own = sys.orig_argv[sys.orig_argv.index(name) :] if rank() and name in sys.orig_argv else []
    with suppress(OSError):
        words = Path(f"/proc/{os.getppid()}/cmdline").read_text(encoding="utf-8").split("\0")[:-1]
        if own and words[-len(own) :] == own:
            begin = [name if shutil.which(name := Path(word).name) == word else word for word in words[:2]]
            script = begin[1:] != words[1:2]  # its interpreter stands before it
            return shlex.join([*begin[script:], *words[2 : -len(own)]])
    return "npugraph-ex"
