"""`npugraph-ex options`: the table of compile options, as a table, as a list on a narrow terminal, or as JSON; or one option."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from npugraph_ex.commands.terminal import completes, show
from npugraph_ex.config import OPTION_TABLE, Option
from npugraph_ex.config.options import unknown_flat_name
from npugraph_ex.errors import UsageError

_TABLE_WIDTH = 120  # a narrower table breaks words
_PIPED_WIDTH = 1000  # wider than any table, so that no name is broken for those who search in it


def add_parser(commands: Any) -> None:
    """Describe the command line."""
    parser = commands.add_parser(
        "options", help="the table of compile options, or one of them",
        description="Every option of torch.compile(..., options={...}): its default, what it takes, what it does, TorchAir's name.",
    )  # fmt: skip
    name = parser.add_argument("name", nargs="?", help="an option such as lift; all of them if left out")
    completes(name, lambda: OPTION_TABLE)


def run(arguments: argparse.Namespace) -> int:
    """Print every option, or the one that is named; the exit status is 0.

    Raises:
        UsageError: no option has this name; the message has the nearest one.
    """
    if arguments.name is not None and arguments.name not in OPTION_TABLE:
        raise UsageError(str(unknown_flat_name(arguments.name)))
    rows = [row for row in OPTION_TABLE.values() if arguments.name in {None, row.name}]
    console = Console(width=None if sys.stdout.isatty() else _PIPED_WIDTH, highlight=False)
    if arguments.json:
        show(arguments, [_as_dict(row) for row in rows], "")
    elif arguments.name is not None or console.width < _TABLE_WIDTH:
        for row in rows:
            console.print(f"{row.name} = {row.default!r}", style="bold", markup=False)
            console.print("\n".join(f"    {line}" for line in described(row).splitlines()), markup=False)
    else:
        table = Table(title="options of backend='npugraph_ex'", title_justify="left")
        for column, width in (
            ("option", None),
            ("default", None),
            ("allowed", 48),
            ("meaning", 56),
            ("TorchAir", None),
        ):
            table.add_column(column, max_width=width, overflow="fold")
        for row in rows:
            table.add_row(row.name, repr(row.default), _allowed(row), row.meaning, _torchair(row))
        console.print(table, markup=False)
    return 0


def described(row: Option) -> str:
    """What an option does and takes, as lines without its name."""
    return f"{row.meaning}\ntakes {_allowed(row)}" + (f"\nTorchAir: {_torchair(row)}" if row.torchair else "")


def _torchair(row: Option) -> str:
    return f"{row.torchair}{' (inverted)' if row.inverted else ''}"


def _allowed(row: Option) -> str:
    limit = "" if row.honoured is None else f" (this version: {', '.join(repr(value) for value in row.honoured)})"
    return row.kind.allowed + limit


def _as_dict(row: Option) -> dict[str, object]:
    return {
        "name": row.name,
        "default": row.default,
        "allowed": row.kind.allowed,
        "meaning": row.meaning,
        "torchair": row.torchair,
        "inverted": row.inverted,
        "honoured": row.honoured,
    }
