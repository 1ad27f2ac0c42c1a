"""`npugraph-ex diff A B`: where do the values of two runs part?"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from npugraph_ex._plurals import counted, noun
from npugraph_ex.commands.numbers import at_least
from npugraph_ex.commands.terminal import show
from npugraph_ex.console.interrupts import interruptible
from npugraph_ex.console.progress import progress
from npugraph_ex.errors import UsageError

if TYPE_CHECKING:
    from npugraph_ex.observe.compare import Comparison

_DESCRIPTION = """\
Compare two dumps that the option dump_tensor_data wrote, node by node in the order of execution: of two runs, of the
graph before and after the passes (data_dump_stage), of two machines. Prints the first node whose values differ.

examples:
  npugraph-ex diff dump_before dump_after
  npugraph-ex diff dump_cpu dump_npu --ulps 2 --all
  npugraph-ex diff npugraph_ex_data/pid_7/graph__1 npugraph_ex_data/pid_7/graph__2

exit status: 0 equal, 1 different or with calls that the other has not, 2 wrong use or a file of a dump is missing or damaged,
130 after Ctrl-C (what differs so far is printed)
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "diff", help="the first node whose values differ between two dumps", description=_DESCRIPTION,
    )  # fmt: skip
    parser.add_argument("first", help="a folder of dumps: of one call, of a graph, or any above")
    parser.add_argument("second", help="the other one")
    parser.add_argument(
        "--ulps", type=at_least(0), default=0, metavar="N", help="up to N ULPs are no difference (default: 0)"
    )
    parser.add_argument("--all", action="store_true", help="list every node that differs")


def run(arguments: argparse.Namespace) -> int:
    """Compare and print.

    Raises:
        NpuGraphExError: a folder holds no dump or a damaged one, or the two have no call in common.
    """
    for folder in (arguments.first, arguments.second):
        if not Path(folder).is_dir():
            raise UsageError(f"there is no folder {folder!r}; name one that the option dump_tensor_data wrote")
    # Dumps hold host tensors: no device is needed to read them, and torch must not fail for want of one.
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    from npugraph_ex.observe.compare import Comparison, compare

    found = Comparison()
    quiet = arguments.quiet or not sys.stderr.isatty()  # in a pipe, lines of progress would hide the answer
    with interruptible() as stop, progress(None, quiet=quiet) as reached:

        def note(so_far: Comparison, total: int, node: str) -> None:
            nonlocal found
            found = so_far
            reached(found.compared, node, total)
            stop.check()

        try:
            found = compare(Path(arguments.first), Path(arguments.second), within=arguments.ulps, on_node=note)
        except KeyboardInterrupt:
            sys.stderr.write(f"npugraph-ex: stopped by {stop}\n")
    show(arguments, found, _as_text(found, every=arguments.all))
    return stop.status if stop.number else int(not found.equal)


def _as_text(found: Comparison, *, every: bool) -> str:
    shown = found.differences if every else found.differences[:1]
    lines = []
    for difference in shown:
        place = f" ({difference.source})" if difference.source else ""
        apart = "" if difference.ulps is None else f"; {counted(difference.ulps, 'ULP')} apart"
        lines.append(f"{difference.call}: {difference.node}, {difference.operator}{place}: {difference.what}{apart}")
    for which, calls in (("first", found.calls_only_first), ("second", found.calls_only_second)):
        if calls:
            lines.append(
                f"{noun(len(calls), 'one call is', f'{len(calls)} calls are')} in the {which} only: {', '.join(calls)}"
            )
    more = len(found.differences) - len(shown)
    rest = f", {more:,} more {noun(more, 'node differs', 'nodes differ')} after it (--all lists them)" if more else ""
    lines.append(
        f"{counted(found.compared, 'node')} compared, {len(found.differences):,} "
        f"{noun(len(found.differences), 'differs', 'differ')}{rest}; "
        f"{found.only_first} only in the first, {found.only_second} only in the second"
    )
    return "\n".join(lines)
