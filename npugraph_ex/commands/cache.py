"""`npugraph-ex cache`: list, show and clear saved compilations."""

from __future__ import annotations

import argparse
import datetime as dt
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from npugraph_ex.cache.store import SUFFIX, Store, read_entry
from npugraph_ex.errors import NpuGraphExError, SavedGraphError, UsageError


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command and its three actions."""
    parser = commands.add_parser("cache", help="look at saved compilations, or delete them")
    parser.add_argument("--dir", help="the folder; $NPUGRAPH_EX_CACHE, or the user's cache folder, without it")
    actions = parser.add_subparsers(dest="action", required=True, metavar="action")
    actions.add_parser("ls", help="one line a saved compilation: name, size, age, whether it is sound")
    show = actions.add_parser("show", help="what one was made from and for, and its graph as Python")
    show.add_argument("name", help="a name of `ls`, with or without .nge, or the path of a file")
    clear = actions.add_parser("clear", help="delete saved compilations, all or those whose names begin so")
    clear.add_argument("prefix", nargs="?", default="", help="the beginning of the names")


def run(arguments: argparse.Namespace) -> int:
    """Do what the command line says.

    Raises:
        UsageError: the folder that was named is none.
        NpuGraphExError: there is no such compilation, or it cannot be read.
    """
    store = Store(arguments.dir)
    if arguments.dir is not None and not store.directory.is_dir():
        raise UsageError(
            f"--dir {arguments.dir!r} is no folder; it takes the one that was given to cache_compile as cache_dir"
        )
    if arguments.action == "show":
        return _show(store, arguments.name)
    if arguments.action == "clear":
        return _clear(store, arguments.prefix)
    return _list(store)


def _list(store: Store) -> int:
    """Print the table; the status says whether every file is sound."""
    table = Table("name", "bytes", "written", "sound", title=f"saved compilations in {store.directory}")
    unsound = 0
    for path in store.entries():
        status = path.lstat()
        written = dt.datetime.fromtimestamp(status.st_mtime, tz=dt.UTC)
        try:
            read_entry(path)
            verdict = "yes"
        except (SavedGraphError, OSError) as error:
            verdict, unsound = f"no: {error}", unsound + 1
        table.add_row(_name(store, path), f"{status.st_size:,}", f"{written:%Y-%m-%d %H:%M} UTC", verdict)
    Console(soft_wrap=not sys.stdout.isatty()).print(table, markup=False)
    return 1 if unsound else 0


def _name(store: Store, path: Path) -> str:
    return str(path.relative_to(store.directory)).removesuffix(SUFFIX)


def _show(store: Store, name: str) -> int:
    from npugraph_ex.inference.readable import describe

    named = store.path(name.removesuffix(SUFFIX))  # warnings and `ls` of the shell show the file, suffix included
    path = named if named.exists() else Path(name)
    if not path.is_file():
        raise NpuGraphExError(f"there is no saved compilation {name!r} in {store.directory}; `cache ls` lists them")
    sys.stdout.write(describe(path))
    return 0


def _clear(store: Store, prefix: str) -> int:
    """Delete; a file that another process reads meanwhile stays readable to it."""
    count = 0
    for path in store.entries():
        if str(path.relative_to(store.directory)).startswith(prefix):  # the whole file name is a prefix too
            path.unlink(missing_ok=True)
            count += 1
    sys.stdout.write(f"{count} saved compilation{'' if count == 1 else 's'} deleted from {store.directory}\n")
    return 0
