"""`npugraph-ex conformance mutants`: every deliberate fault is switched on in turn, and the suite must notice each."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from npugraph_ex._plurals import counted
from npugraph_ex.commands.interrupts import interruptible
from npugraph_ex.commands.numbers import at_least
from npugraph_ex.errors import UsageError

if TYPE_CHECKING:
    from npugraph_ex_conformance.mutants.search import Kill

_PAGE = """\
# Mutants

<!-- Written by `npugraph-ex conformance mutants --markdown {path}`; do not edit. -->

A mutant is a deliberate fault in one part of the library. `npugraph-ex conformance mutants` switches each on in turn, and
random examples must notice it within {budget}; a survivor fails the run. The examples are those of seed 0, so the table is
the same everywhere.

{summary}

{table}
"""


def parser() -> argparse.ArgumentParser:
    """The command line after ``mutants``."""
    own = argparse.ArgumentParser(prog="npugraph-ex conformance mutants", description=__doc__)
    own.add_argument("names", nargs="*", metavar="NAME", help="mutants; all when none is named")
    own.add_argument(
        "--budget", type=at_least(1), metavar="N", help="examples that a mutant may survive (default: 250)"
    )
    own.add_argument("--markdown", type=Path, metavar="FILE", help="also write the table as a page")
    return own


def run(arguments: argparse.Namespace, *, target: str | None = None) -> int:
    """Kill them, print the table, and answer 1 if any survived, or if an example that killed one fails without it.

    After Ctrl-C the table of those that were done is printed; the status is 130.

    Raises:
        UsageError: there is no such mutant, or no such target.
    """
    from npugraph_ex.testing.targets import start_target

    sys.stdout.write(f"{start_target(target or 'emulated').describe(seed=0)}\n\n")
    import torch

    from npugraph_ex.testing import mutation
    from npugraph_ex_conformance.mutants import table as kill_table
    from npugraph_ex_conformance.mutants.search import BUDGET, false_kills, kill_all

    torch.set_num_threads(1)
    known = mutation.mutants()
    unknown = sorted(set(arguments.names) - set(known))
    if unknown:
        raise UsageError(f"there is no mutant called {', '.join(unknown)}; there are {', '.join(known)}")
    budget = BUDGET if arguments.budget is None else arguments.budget
    kills: list[Kill] = []
    with interruptible() as stop:

        def note(done: Kill) -> None:
            kills.append(done)
            _progress(done)
            stop.check()

        try:
            kill_all(arguments.names or None, budget=budget, on_kill=note)
        except KeyboardInterrupt:
            _print(kills)
            asked = len(arguments.names or known)
            sys.stderr.write(f"npugraph-ex: stopped by {stop} after {len(kills)} of {counted(asked, 'mutant')}\n")
            return stop.status
    _print(kills)
    false = list(false_kills(kills))
    sys.stdout.write("".join(f"WRONG without any mutant: {message}\n" for message in false))
    if arguments.markdown is not None:
        page = _PAGE.format(
            path=arguments.markdown.name, budget=BUDGET, summary=_counted(kills), table=kill_table.markdown(kills)
        )
        arguments.markdown.write_text(page, encoding="utf-8")
    return int(bool(false) or any(done.examples is None for done in kills))


def _print(kills: list[Kill]) -> None:
    from npugraph_ex_conformance.mutants import table as kill_table

    sys.stderr.write("\n" if sys.stderr.isatty() else "")
    sys.stdout.write(f"{kill_table.plain(kills)}\n\n{kill_table.summary(kills)}\n")


def _counted(kills: list[Kill]) -> str:
    """The summary without what differs from machine to machine."""
    from npugraph_ex_conformance.mutants import table as kill_table

    return kill_table.summary(kills).split(";")[0] + "."


def _progress(done: Kill) -> None:
    """One line that replaces itself on a terminal, nothing elsewhere."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{done.mutant}: {done.examples or 'SURVIVED'}")
        sys.stderr.flush()
