"""`npugraph-ex cache`: list, show and clear saved compilations."""

from __future__ import annotations

import argparse
import datetime as dt
from pathlib import Path

from tabulate import tabulate

from npugraph_ex._plurals import counted
from npugraph_ex.cache.store import SUFFIX, Store, read_entry
from npugraph_ex.commands.terminal import listed, show
from npugraph_ex.errors import SavedGraphError, UsageError

_MINUTES = "%Y-%m-%d %H:%M UTC"
_EXAMPLES = {
    "ls": "cache ls\ncache ls --dir compiled --json",
    "show": "cache show Model.decode",
    "clear": "cache clear                all\ncache clear Model.decode   those whose names begin so\n"
    "cache clear NAME NAME      those of a warning, which are not used any more",
}


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command and its three actions."""
    parser = commands.add_parser(
        "cache", help="look at saved compilations, or delete them",
        description="Compilations that npugraph_ex.inference.cache_compile saved: which there are, what one has, and their end.",
    )  # fmt: skip
    parser.add_argument(
        "--dir", metavar="DIR", help="the folder; $NPUGRAPH_EX_CACHE, or the user's cache folder, without it"
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="action")
    helps = {
        "ls": "one line a saved compilation: name, size, age, whether it is sound",
        "show": "what one was made from and for, and its graph as Python",
        "clear": "delete saved compilations, all or those whose names begin so",
    }
    _, show, clear = (
        actions.add_parser(name, help=said, description=f"{said[0].upper()}{said[1:]}.", epilog=listed(_EXAMPLES[name]))
        for name, said in helps.items()
    )
    show.add_argument("name", help="a name of `ls`, or a part of it that no other name has, or the path of a file")
    clear.add_argument("prefix", nargs="*", help="a name, or the beginning of some; all without it")
    for (
        action
    ) in actions.choices.values():  # after the action's name, too; there it has no default that would undo the other
        action.add_argument("--dir", metavar="DIR", default=argparse.SUPPRESS, help="the folder, as before the action")


def run(arguments: argparse.Namespace) -> int:
    """Do what the command line says.

    Raises:
        UsageError: there is no such folder, or it cannot be read, or no such compilation is in it.
        SavedGraphError: a compilation cannot be read.
    """
    store = Store(arguments.dir)
    if not store.directory.is_dir():
        return _no_folder(store, arguments)
    try:
        next(store.directory.iterdir(), None)
    except OSError as error:
        raise UsageError(f"the folder {store.directory} cannot be read: {error.strerror}") from error
    if arguments.action == "show":
        return _show(store, arguments)
    if arguments.action == "clear":
        return _clear(store, arguments)
    return _list(store, arguments)


def _list(store: Store, arguments: argparse.Namespace) -> int:
    """Print the table; the status says whether every file is sound."""
    rows, saved = [], []
    for path in store.entries():
        status, written = path.lstat(), _written(path)
        name, fault = _name(store, path), ""
        try:
            read_entry(path)
        except (SavedGraphError, OSError) as error:
            fault = str(error)
        sound = f"no: {fault.replace(str(path), 'it')}" if fault else "yes"
        rows.append((name, f"{status.st_size:,}", f"{written:{_MINUTES}}", sound))
        when = written.isoformat(timespec="seconds")
        saved.append({"name": name, "bytes": status.st_size, "written": when, "sound": not fault, "fault": fault})
    headers = ("name", "bytes", "written", "sound")
    text = f"{counted(len(rows), 'saved compilation')} in {store.directory}\n"
    if rows:  # whole names, however long: they are what `show` and `clear` take
        text += f"\n{tabulate(rows, headers=headers, tablefmt='simple', disable_numparse=True)}\n"
    show(arguments, {"folder": str(store.directory), "saved": saved}, text)
    return 0 if all(one["sound"] for one in saved) else 1


def _no_folder(store: Store, arguments: argparse.Namespace) -> int:
    """Nothing can be in a folder that is not there; a folder that somebody named should be.

    Raises:
        UsageError: it was named, or it is a file, or a compilation in it is asked for.
    """
    if arguments.dir is not None:
        raise UsageError(
            f"--dir {arguments.dir!r} is no folder; it takes the one that was given to cache_compile as cache_dir"
        )
    if store.directory.exists():
        raise UsageError(
            f"{store.directory} is a file; saved compilations are kept in a folder of this name. Move it away"
        )
    said = f"nothing was saved yet: there is no folder {store.directory} ($NPUGRAPH_EX_CACHE or --dir name another)"
    if arguments.action == "show":
        raise UsageError(said)
    nothing: dict[str, object] = {"saved": []} if arguments.action == "ls" else {"deleted": 0}
    show(arguments, {"folder": str(store.directory), **nothing}, said)
    return 0


def _name(store: Store, path: Path) -> str:
    return str(path.relative_to(store.directory)).removesuffix(SUFFIX)


def _written(path: Path) -> dt.datetime:
    return dt.datetime.fromtimestamp(path.lstat().st_mtime, tz=dt.timezone.utc)


def _show(store: Store, arguments: argparse.Namespace) -> int:
    from npugraph_ex.inference.readable import describe

    name: str = arguments.name
    named = store.path(name.removesuffix(SUFFIX))  # warnings and `ls` of the shell show the file, suffix included
    path = named if named.exists() else Path(name)
    if not path.is_file():
        path = _only(store, name)
    text = describe(path)
    show(arguments, {"file": str(path), "text": text}, text)
    return 0


def _only(store: Store, part: str) -> Path:
    """The one compilation whose name begins so, or, where none begins so, has this part.

    Raises:
        UsageError: there is none, or more than one.
    """
    from npugraph_ex.inference.readable import differing

    names = {_name(store, path): path for path in store.entries()}
    found = [name for name in names if name.startswith(part)] or [name for name in names if part in name]
    if len(found) == 1:
        return names[found[0]]
    if not found:
        raise UsageError(f"there is no saved compilation {part!r} in {store.directory}; `cache ls` lists them")
    differences = differing([names[name] for name in found])
    told = "".join(
        f"\n  {name}\n    written {_written(names[name]):{_MINUTES}}{f'; {difference}' if difference else ''}"
        for name, difference in zip(found, differences, strict=True)
    )
    raise UsageError(f"{part!r} is a part of {len(found)} names; which of them?{told}")


def _clear(store: Store, arguments: argparse.Namespace) -> int:
    """Delete; a file that another process reads meanwhile stays readable to it."""
    count, prefixes = 0, tuple(arguments.prefix) or ("",)
    for path in store.entries():
        if str(path.relative_to(store.directory)).startswith(prefixes):  # the whole file name is a prefix too
            path.unlink(missing_ok=True)
            count += 1
    text = f"{counted(count, 'saved compilation')} deleted from {store.directory}"
    show(arguments, {"folder": str(store.directory), "deleted": count}, text)
    return 0
