"""`npugraph-ex upstream PATH`: runs another project's tests of NPU operators on the emulated device."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from npugraph_ex._plurals import counted
from npugraph_ex.commands.numbers import at_least
from npugraph_ex.commands.output_files import output_file
from npugraph_ex.commands.suites import require
from npugraph_ex.console.interrupts import end_children, interruptible
from npugraph_ex.console.progress import progress
from npugraph_ex_conformance.upstream import checkout as checkouts
from npugraph_ex_conformance.upstream import known, tables
from npugraph_ex_conformance.upstream.outcome import UpstreamOutcome

_STDOUT = Path("-")
_DESCRIPTION = """\
Run the tests of another project, which was written for real NPUs, on the emulated device, and count what passed, what failed
by which cause, and what skipped itself by which reason. PATH is a checkout of op-plugin or torch_npu, or a folder or file of
its tests. Each file runs in a process of its own; a process that crashes or takes too much is reported, and the tests after
it run in another one. A test that asks for a chip (SupportedDevices) runs on that chip. Nothing is written into the checkout.

  npugraph-ex upstream op-plugin/test/test_custom_ops           a folder
  npugraph-ex upstream op-plugin -k rms_norm --jobs 2           files whose name has rms_norm, two at a time
  npugraph-ex upstream torch_npu/test/npu --json results.json   every outcome with its message
  npugraph-ex upstream op-plugin --documents                    no tests: does each formula take what the documents list?

A failure that is no fault of the device has a line in a file of known differences: a pattern of tests and the reason.

exit status: 0 every failure is known, 1 one is not or a known difference is gone, 2 wrong use or nothing ran, 130 after Ctrl-C
(the table has what ran before it)
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "upstream", help="run the tests of op-plugin or torch_npu on the emulated device", description=_DESCRIPTION,
    )  # fmt: skip
    parser.add_argument("path", type=Path, metavar="PATH", help="a checkout, or a folder or file of its tests")
    parser.add_argument(
        "-k",
        dest="pattern",
        default="*",
        metavar="TEXT",
        help="only files whose name has TEXT; * is a wildcard (default: *)",
    )
    parser.add_argument(
        "--jobs", type=at_least(1), default=1, metavar="N", help="how many files at a time (default: 1)"
    )
    parser.add_argument(
        "--limit", type=at_least(1), default=120, metavar="SECONDS",
        help="processor time, not wall time, that a file may take (default: 120)",
    )  # fmt: skip
    parser.add_argument(
        "--memory", type=at_least(1), default=8, metavar="GIB",
        help="resident memory of the host that the processes of a file may take (default: 8)",
    )  # fmt: skip
    parser.add_argument(
        "--devices", type=at_least(1), default=1, metavar="N",
        help="how many NPUs to emulate; tests of collectives want 2 or more (default: 1)",
    )  # fmt: skip
    parser.add_argument(
        "--documents", action="store_true",
        help="read the operator documents below PATH and give each listed dtype, layout and mode to the operator's formula",
    )  # fmt: skip
    parser.add_argument(
        "--json", type=output_file, nargs="?", const=_STDOUT, metavar="FILE",
        help="every outcome as one JSON object: into FILE beside the table, or alone in place of the table",
    )  # fmt: skip
    parser.add_argument(
        "--known", type=Path, default=known.OURS, metavar="FILE",
        help="known differences, in TOML (default: those of this project)",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Run, print, and answer as the description says.

    Raises:
        UsageError: there is no such path, no test file in it, or the known differences cannot be read.
    """
    if arguments.documents:
        return _read(arguments)
    require("upstream runs tests with", {"pytest": "pytest"}, "tests")
    checkout = checkouts.find(arguments.path, arguments.pattern)
    entries = known.load(arguments.known, checkout.project)
    outcomes: list[UpstreamOutcome] = []
    with interruptible() as stop, progress(len(checkout.files), quiet=arguments.quiet) as reached:
        try:
            _run_all(checkout, arguments, outcomes, reached)
        except KeyboardInterrupt:
            end_children()
    outcomes.sort()
    outcomes = known.explained(outcomes, entries)
    stale = [] if stop.number else list(known.stale(outcomes, entries))
    _write(arguments, tables.as_json(outcomes, stale, complete=not stop.number), tables.report(outcomes, stale))
    if stop.number:
        files = len({outcome.file for outcome in outcomes})
        sys.stderr.write(f"npugraph-ex: stopped by {stop} after {files} of {counted(len(checkout.files), 'file')}\n")
        return stop.status
    return _status(outcomes, stale)


def _read(arguments: argparse.Namespace) -> int:
    """The same for documents: what their formulas do not take. Formulas run on the CPU, so no device starts."""
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    from npugraph_ex_conformance.upstream import asked, documents

    entries = known.load(arguments.known, "op-plugin-documents")
    outcomes = known.explained([*asked.answers(documents.listed(arguments.path, arguments.pattern))], entries)
    stale = [*known.stale(outcomes, entries)]
    _write(arguments, tables.as_json(outcomes, stale, complete=True), tables.of_documents(outcomes, stale))
    return _status(outcomes, stale)


def _status(outcomes: Sequence[UpstreamOutcome], stale: Sequence[str]) -> int:
    unexplained = any(outcome.state == "failed" and not outcome.known for outcome in outcomes)
    ran = any(outcome.state != "skipped" for outcome in outcomes)
    return int(bool(unexplained or stale)) if ran else 2


def _write(arguments: argparse.Namespace, found: str, table: Iterable[str]) -> None:
    """The outcomes as JSON, the table, or both, as `--json` says."""
    if arguments.json not in {None, _STDOUT}:
        arguments.json.write_text(found, encoding="utf-8")
    sys.stdout.write(f"{found}\n" if arguments.json == _STDOUT else "\n".join(["", *table, ""]))


def _run_all(
    checkout: checkouts.Checkout,
    arguments: argparse.Namespace,
    outcomes: list[UpstreamOutcome],
    reached: Callable[[int, str], None],
) -> None:
    """Run the files, several at a time; tell of each."""
    from npu_emulator.settings import SOCS
    from npugraph_ex_conformance.upstream.process import ProcessLimits, run_file

    limits = ProcessLimits(arguments.limit, arguments.memory, arguments.devices, SOCS)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        running = {pool.submit(run_file, file, checkout, limits): file for file in checkout.files}
        try:
            for number, future in enumerate(as_completed(running), 1):
                found = future.result()
                outcomes.extend(found)
                name = checkout.name(running[future])
                reached(number, f"{name}: {tables.tally(found)}")
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            while any(future.running() for future in running):
                end_children()  # again: a thread may just have been about to start a process
            raise
