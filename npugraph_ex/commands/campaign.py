"""`npugraph-ex campaign`: many examples of many kinds on many cores, by Ray; what is written is never run again."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable
from contextlib import redirect_stdout
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from npugraph_ex.commands.numbers import at_least, whole
from npugraph_ex.commands.suites import require
from npugraph_ex.commands.terminal import completes, show
from npugraph_ex.console.interrupts import interruptible
from npugraph_ex.console.progress import progress
from npugraph_ex.errors import UsageError
from npugraph_ex.observe.installing import install_command

if TYPE_CHECKING:
    from npugraph_ex_conformance.campaign.driver import Driver
    from npugraph_ex_conformance.campaign.ledger import Ledger, Row

_NEEDED = {name: name for name in ("ray", "hypothesis", "transformers", "coverage")}
_DESCRIPTION = """\
Run very many examples: random programs, schedules, mutants, operators, models, other projects' tests. KIND=COUNT says how many of
which; KIND alone is all of a kind that has an end. --list names the kinds. Ray shares them among the cores of this machine, or
of a cluster (--address). Every answer is written to DIR/results.jsonl as it comes; --resume runs the rest of that campaign.

  npugraph-ex campaign integers=200000 planted=20000 streams=20000
  npugraph-ex campaign operators mutants --workers 8

An item that crashes its process, waits for ever, takes too long or takes too much memory is an answer, too.

exit status: 0 all right, 1 something is wrong, 2 wrong use, 130 after Ctrl-C, 143 after SIGTERM
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "campaign", help="very many examples of the conformance suite, on all cores or on a cluster",
        description=_DESCRIPTION,
    )  # fmt: skip
    kinds = parser.add_argument("kinds", nargs="*", metavar="KIND[=COUNT]", help="what to run")
    completes(kinds, _kinds)
    parser.add_argument("--list", action="store_true", help="name the kinds and end")
    parser.add_argument(
        "--target", choices=("emulated", "npu"), default="emulated", help="which device (default: emulated)"
    )
    parser.add_argument(
        "--address", metavar="ADDRESS", help="of a Ray cluster; auto: the one that runs on this machine"
    )
    parser.add_argument("--workers", type=at_least(1), metavar="N", help="cores of this machine to use (default: all)")
    parser.add_argument("--seed", type=whole, default=0, metavar="N", help="decides the examples (default: 0)")
    parser.add_argument(
        "--report-dir", type=Path, default=Path("campaign_report"), metavar="DIR",
        help="where results.jsonl, report.html and failing scripts go (default: campaign_report)",
    )  # fmt: skip
    parser.add_argument("--resume", action="store_true", help="run what the campaign in DIR has no answer for")
    parser.add_argument(
        "--memory",
        type=at_least(1),
        default=4,
        metavar="GIB",
        help="the most that an item's process may take (default: 4)",
    )
    parser.add_argument(
        "--limit", type=at_least(1), metavar="SECONDS", help="of processor time an item (default: its kind's)"
    )
    parser.add_argument(
        "--nice", type=at_least(0), default=0, metavar="N", help="stand back behind other work (default: 0)"
    )
    parser.add_argument(
        "--checkout", default="", metavar="PATH", help="op-plugin's or torch_npu's tests, for the kind upstream"
    )


def _kinds() -> Iterable[str]:
    from npugraph_ex_conformance.campaign.kinds import KINDS

    return KINDS


def run(arguments: argparse.Namespace) -> int:
    """Run it, show how far it is, and write the page."""
    from npugraph_ex_conformance.campaign.kinds import KINDS, upstream_files
    from npugraph_ex_conformance.items import CampaignSettings

    if arguments.list:
        width = max(map(len, KINDS))
        lines = [f"{kind.name:<{width}}  {kind.what}" for kind in KINDS.values()]
        show(arguments, {kind.name: kind.what for kind in KINDS.values()}, "\n".join(lines))
        return 0
    plan = _plan(arguments.kinds)
    require("a campaign needs", _NEEDED, "campaign")
    from npugraph_ex_conformance.campaign.driver import Driver, cluster, sizes
    from npugraph_ex_conformance.campaign.ledger import FILE, Ledger, refuse
    from npugraph_ex_conformance.folders import FolderError, prepare

    settings = CampaignSettings(
        arguments.seed, arguments.target, arguments.memory, arguments.nice, arguments.checkout, arguments.limit
    )
    if "upstream" in plan and not arguments.address:  # a cluster's machines may have folders that this one has not
        upstream_files(settings)
    folder: Path = arguments.report_dir
    refuse(folder / FILE, resume=arguments.resume)
    _import_ray()
    try:
        lock = prepare(folder, resume=False)
    except FolderError as error:
        raise UsageError(str(error)) from error
    with interruptible() as stop, cluster(arguments.address, arguments.workers) as dashboard:
        ledger = Ledger(folder / FILE, sizes(settings, plan), {**asdict(settings), **_versions()})
        ledger.open(resume=arguments.resume)
        driver = Driver(ledger, settings)
        try:
            with redirect_stdout(sys.stderr):  # where Ray's threads print what they say of nodes that die
                _follow(driver, ledger, dashboard, quiet=arguments.quiet)
                driver.shrink()
        except KeyboardInterrupt:
            sys.stderr.write(
                f"npugraph-ex: stopped by {stop}; --resume runs the rest and writes the scripts of failures\n"
            )
        status = _finish(ledger, folder, arguments)
    os.close(lock)
    return stop.status if stop.number else status


def _plan(words: list[str]) -> dict[str, int | None]:
    """How many of each kind; None for all."""
    from npugraph_ex_conformance.campaign.kinds import kind_named

    plan: dict[str, int | None] = {}
    for word in words:
        name, equals, count = word.partition("=")
        kind = kind_named(name)
        if equals and not (count.isdecimal() and int(count)):
            raise UsageError(f"{word!r}: the number of items is a whole number, at least 1")
        if not equals and kind.size is None:
            raise UsageError(f"there is no end of {name!r}; say how many, as in {name}=10000")
        if name in plan:
            raise UsageError(f"{name!r} is there twice; one number of items for each kind")
        plan[name] = int(count) if equals else None
    if not plan:
        raise UsageError("name what to run, as in integers=10000; --list names the kinds")
    return plan


def _versions() -> dict[str, str]:
    """Of what decides an answer."""
    return {name: metadata.version(name) for name in ("npugraph-ex", "torch", "torch_npu")}


def _import_ray() -> None:
    """Import Ray, which may lack something of its own: then one sentence says what.

    Raises:
        UsageError: it cannot be imported.
    """
    try:
        import ray  # noqa: F401 - what follows imports it
    except ImportError as error:
        raise UsageError(f"Ray is installed and cannot be imported: {error}; {install_command('campaign')}") from error


def _follow(driver: Driver, ledger: Ledger, dashboard: str, *, quiet: bool) -> None:
    """Run it, and tell how far it is."""
    if dashboard and not quiet:
        sys.stderr.write(f"Ray's dashboard: http://{dashboard}\n")
    wrong = sum(row.is_wrong for row in ledger.rows)
    with progress(sum(ledger.plan.values()), quiet=quiet, done=len(ledger.rows)) as reached:

        def report(rows: list[Row]) -> None:
            nonlocal wrong
            wrong += sum(row.is_wrong for row in rows)
            reached(len(ledger.rows), f"{wrong} wrong")

        driver.on_rows = report
        driver.run()


def _finish(ledger: Ledger, folder: Path, arguments: argparse.Namespace) -> int:
    """Print the tables, and write the page and the scripts."""
    from tabulate import tabulate

    from npugraph_ex_conformance.campaign import summary
    from npugraph_ex_conformance.folders import SCRIPTS, write_whole

    ledger.close()
    write_whole(folder / "report.html", summary.page(ledger))
    for line in ledger.notes:
        if line.get("script"):
            (folder / SCRIPTS).mkdir(exist_ok=True)
            write_whole(folder / SCRIPTS / f"{line['shrunk'].split()[0].replace('/', '_')}.py", line["script"])
    sentence, good = summary.verdict(ledger)
    parts = [
        tabulate(summary.kind_rows(ledger), headers=summary.KIND_HEADERS, tablefmt="simple", disable_numparse=True),
        tabulate(summary.run_rows(ledger), headers=summary.RUN_HEADERS, tablefmt="simple", disable_numparse=True),
        *(f"WRONG {len(rows):6d} × {cause}" for cause, rows in summary.causes(ledger.rows).items()),
        sentence, f"written: {folder / 'report.html'}",
    ]  # fmt: skip
    causes = {cause: [row.item for row in rows] for cause, rows in summary.causes(ledger.rows).items()}
    found = {"verdict": sentence, "good": good, "done": len(ledger.rows), "left": ledger.left, "causes": causes}
    show(arguments, {**found, "page": folder / "report.html"}, "\n\n".join(parts))
    return int(not good)
