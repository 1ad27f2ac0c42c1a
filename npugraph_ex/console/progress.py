"""How far something long is: a bar on a terminal, a line now and then in a file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from rich.console import Console


class Progressed(Protocol):
    """Says how far a command is; ``of`` gives or corrects the total."""

    def __call__(self, count: float, said: str, of: int | None = None) -> None:
        """Show it."""


def as_in_a_file() -> dict[str, Any]:
    """What makes a console write as to a file in a notebook: `!` runs a command on a terminal, and a cell keeps every redrawing."""
    return {"force_terminal": False, "no_color": True} if "JPY_PARENT_PID" in os.environ else {}


@contextmanager
def progress(
    total: int | None, *, quiet: bool, done: int = 0, lines: int = 100, console: Console | None = None
) -> Iterator[Progressed]:
    """Tell on stderr how far a command is: on a terminal a bar with the time left, in a file a line for each hundredth.

    Args:
        total: of how many; None where nobody knows yet.
        quiet: tell nothing.
        done: how many were done before.
        lines: about how many a file has in all.
        console: where to write.

    Yields:
        What is called with the number done so far, a part of one included, and a few words about it.
    """
    from rich import progress as bars
    from rich.console import Console

    mine = console is None  # then what is printed meanwhile stands above the bar
    console = console or Console(stderr=True, **as_in_a_file())
    columns = (
        bars.TextColumn("{task.description}", markup=False), bars.BarColumn(), bars.MofNCompleteColumn(),
        bars.TimeElapsedColumn(), bars.TextColumn("left"), bars.TimeRemainingColumn(),
    )  # fmt: skip
    drawn = console.is_terminal and not quiet
    with bars.Progress(
        *columns, console=console, disable=not drawn, transient=True, redirect_stdout=mine, redirect_stderr=mine
    ) as bar:
        task = bar.add_task("", total=total, completed=done)
        told = done

        def reached(count: float, said: str, of: int | None = None) -> None:
            nonlocal told, total
            total = total if of is None else of
            bar.update(task, completed=count, total=total, description=said)
            if not quiet and not drawn and (count == total or count - told >= max((total or 0) // lines, 1)):
                told = int(count)
                console.print(
                    f"[{count}{f'/{total}' if total else ''}] {said}", markup=False, highlight=False, soft_wrap=True
                )

        yield reached


@contextmanager
def uncaptured_progress(total: int, *, quiet: bool) -> Iterator[Progressed]:
    """As `progress`, beside a pytest that takes the process's stderr away while a test runs: the bar keeps its own."""
    from rich.console import Console

    with (
        os.fdopen(os.dup(2), "w", encoding="utf-8") as stderr,
        progress(total, quiet=quiet, console=Console(file=stderr, **as_in_a_file())) as reached,
    ):
        yield reached
