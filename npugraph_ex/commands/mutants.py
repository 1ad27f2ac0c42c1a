"""`npugraph-ex conformance mutants`: every deliberate fault is switched on in turn, and the suite must notice each."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from npugraph_ex._plurals import counted
from npugraph_ex.commands.numbers import at_least
from npugraph_ex.commands.output_files import output_file
from npugraph_ex.commands.terminal import Parser, furnish, remark, show
from npugraph_ex.console.interrupts import interruptible
from npugraph_ex.console.progress import progress
from npugraph_ex.errors import UsageError

if TYPE_CHECKING:
    from npugraph_ex_conformance.mutants.search import Kill

_PAGE = """\
# Mutants

<!-- Written by `npugraph-ex conformance mutants --markdown {path}`; do not edit. -->

A mutant is a deliberate fault in one part of the library. `npugraph-ex conformance mutants` switches each on in turn, and
random examples must notice it within {budget}; a survivor fails the run. The examples are those of seed 0, so the table is
the same everywhere.

{table}
"""


def parser() -> argparse.ArgumentParser:
    """The command line after ``mutants``."""
    own = Parser(prog="npugraph-ex conformance mutants", description=__doc__)
    own.add_argument("names", nargs="*", metavar="NAME", help="mutants; all when none is named")
    own.add_argument(
        "--budget", type=at_least(1), metavar="N", help="examples that a mutant may survive (default: 250)"
    )
    own.add_argument("--markdown", type=output_file, metavar="FILE", help="also write the table as a page")
    return furnish(own, examples="conformance mutants matcher-ignores-constants --budget 500")


def run(arguments: argparse.Namespace, *, target: str | None = None) -> int:
    """Kill them, print the table, and answer 1 if any survived, or if an example that killed one fails without it.

    After Ctrl-C the table of those that were done is printed; the status is 130.

    Raises:
        UsageError: there is no such mutant, or no such target.
    """
    from npugraph_ex.testing.targets import start_target

    started = start_target(target or "emulated")
    import torch

    from npugraph_ex.testing import mutation
    from npugraph_ex_conformance.mutants import table as kill_table
    from npugraph_ex_conformance.mutants.search import BUDGET, false_kills, kill_all

    torch.set_num_threads(1)
    known = mutation.mutants()
    for name in arguments.names:
        if name not in known:
            raise UsageError(mutation.no_such_mutant(name))
    remark(arguments, f"{started.describe(seed=0)}\n")
    budget = BUDGET if arguments.budget is None else arguments.budget
    kills: list[Kill] = []
    asked = arguments.names or list(known)
    with interruptible() as stop, progress(len(asked), quiet=arguments.quiet) as reached:

        def note(done: Kill) -> None:
            kills.append(done)
            reached(len(kills), f"{done.mutant}: {done.examples or 'SURVIVED'}")
            stop.check()

        try:
            kill_all(asked, budget=budget, on_kill=note)
        except KeyboardInterrupt:
            sys.stderr.write(f"npugraph-ex: stopped by {stop} after {len(kills)} of {counted(len(asked), 'mutant')}\n")
    false: list[str] = []
    if not stop.number:
        with progress(None, quiet=arguments.quiet) as reached:
            false = list(
                false_kills(kills, on_example=lambda count, total: reached(count, "without any mutant", total))
            )
    lines = [f"{kill_table.plain(kills)}\n", kill_table.summary(kills)]
    lines += [f"WRONG without any mutant: {message}" for message in false]
    show(arguments, {"kills": kills, "wrong_without_a_mutant": false}, "\n".join(lines))
    if stop.number:
        return stop.status
    if arguments.markdown is not None:
        page = _PAGE.format(
            path=arguments.markdown.name, budget=BUDGET, table=kill_table.markdown(kills, _counted(kills))
        )
        arguments.markdown.write_text(page, encoding="utf-8")
    return int(bool(false) or any(done.examples is None for done in kills))


def _counted(kills: list[Kill]) -> str:
    """The summary without what differs from machine to machine."""
    from npugraph_ex_conformance.mutants import table as kill_table

    return kill_table.summary(kills).split(";")[0] + "."
