"""`npugraph-ex conformance alarms`: random programs through the library as it is; whatever is reported is a false alarm."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from npugraph_ex._plurals import counted
from npugraph_ex.commands.numbers import at_least
from npugraph_ex.commands.terminal import Parser, furnish, remark, show
from npugraph_ex.console.interrupts import interruptible
from npugraph_ex.console.progress import progress

if TYPE_CHECKING:
    from npugraph_ex_conformance.false_positives import Alarms

EXAMPLES = 20_000


def parser() -> argparse.ArgumentParser:
    """The command line after ``alarms``."""
    own = Parser(prog="npugraph-ex conformance alarms", description=__doc__)
    own.add_argument(
        "--examples", type=at_least(1), default=EXAMPLES, metavar="N", help=f"how many programs (default: {EXAMPLES})"
    )
    own.add_argument(
        "--first", type=at_least(0), default=0, metavar="N", help="the number of the first program (default: 0)"
    )
    return furnish(own, examples="conformance alarms --examples 2000 --first 20000")


def run(arguments: argparse.Namespace, *, target: str | None = None) -> int:
    """Count them, print the table, and answer 1 if there is any; 130 after Ctrl-C, with the table so far."""
    from npugraph_ex.testing.targets import start_target

    remark(arguments, f"{start_target(target or 'emulated').describe(seed=arguments.first)}\n")
    import torch
    from tabulate import tabulate

    from npugraph_ex_conformance.false_positives import Alarms, count_alarms

    torch.set_num_threads(1)
    alarms = Alarms()
    with interruptible() as stop, progress(arguments.examples, quiet=arguments.quiet) as reached:

        def note(so_far: Alarms) -> None:
            nonlocal alarms
            alarms = so_far
            reached(so_far.examples.total(), counted(len(so_far.raised), "alarm"))
            stop.check()

        try:
            count_alarms(arguments.examples, first=arguments.first, on_example=note)
        except KeyboardInterrupt:
            sys.stderr.write(f"npugraph-ex: stopped by {stop}\n")
    rows = [
        (
            name,
            count,
            sum(family == name for family, _, _ in alarms.raised),
            f"{count / max(alarms.seconds[name], 1e-9):.1f}",
        )
        for name, count in alarms.examples.items()
    ]
    headers = ("programs of", "checked", "false alarms", "a second of processor time")
    lines = [f"{tabulate(rows, headers=headers, tablefmt='simple')}\n"]
    lines += [f"WRONG {family}, number {number}: {message}" for family, number, message in alarms.raised]
    lines.append(f"{counted(len(alarms.raised), 'false alarm')} in {counted(alarms.examples.total(), 'program')}")
    show(arguments, {"checked": dict(alarms.examples), "raised": alarms.raised}, "\n".join(lines))
    return stop.status if stop.number else int(bool(alarms.raised))
