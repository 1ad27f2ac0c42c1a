"""`npugraph-ex conformance alarms`: random programs through the library as it is; whatever is reported is a false alarm."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from npugraph_ex._plurals import counted
from npugraph_ex.commands.interrupts import interruptible
from npugraph_ex.commands.numbers import at_least

if TYPE_CHECKING:
    from npugraph_ex_conformance.false_positives import Alarms

EXAMPLES = 20_000


def parser() -> argparse.ArgumentParser:
    """The command line after ``alarms``."""
    own = argparse.ArgumentParser(prog="npugraph-ex conformance alarms", description=__doc__)
    own.add_argument(
        "--examples", type=at_least(1), default=EXAMPLES, metavar="N", help=f"how many programs (default: {EXAMPLES})"
    )
    own.add_argument(
        "--first", type=at_least(0), default=0, metavar="N", help="the number of the first program (default: 0)"
    )
    return own


def run(arguments: argparse.Namespace, *, target: str | None = None) -> int:
    """Count them, print the table, and answer 1 if there is any; 130 after Ctrl-C, with the table so far."""
    from npugraph_ex.testing.targets import start_target

    sys.stdout.write(f"{start_target(target or 'emulated').describe(seed=arguments.first)}\n\n")
    import torch
    from tabulate import tabulate

    from npugraph_ex_conformance.false_positives import Alarms, count_alarms

    torch.set_num_threads(1)
    alarms = Alarms()
    with interruptible() as stop:

        def note(so_far: Alarms) -> None:
            nonlocal alarms
            alarms = so_far
            _progress(so_far)
            stop.check()

        try:
            count_alarms(arguments.examples, first=arguments.first, on_example=note)
        except KeyboardInterrupt:
            sys.stderr.write(f"\nnpugraph-ex: stopped by {stop}\n")
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
    sys.stdout.write(f"{tabulate(rows, headers=headers, tablefmt='simple')}\n\n")
    sys.stdout.write(
        "".join(f"WRONG {family}, number {number}: {message}\n" for family, number, message in alarms.raised)
    )
    sys.stdout.write(f"{counted(len(alarms.raised), 'false alarm')} in {counted(alarms.examples.total(), 'program')}\n")
    return stop.status if stop.number else int(bool(alarms.raised))


def _progress(alarms: Alarms) -> None:
    """One line that replaces itself on a terminal, a line for every thousand elsewhere."""
    done = alarms.examples.total()
    said = f"{counted(done, 'program')}, {counted(len(alarms.raised), 'alarm')}"
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{said}")
        sys.stderr.flush()
    elif done % 1000 == 0:
        sys.stderr.write(f"{said}\n")
        sys.stderr.flush()
