"""`npugraph-ex conformance`: finds the suite and runs it with pytest; further words are pytest's own options."""

from __future__ import annotations

import argparse
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

from npugraph_ex.commands import alarms, mutants
from npugraph_ex.commands.numbers import at_least, whole
from npugraph_ex.commands.suites import require, run_pytest
from npugraph_ex.commands.terminal import show
from npugraph_ex.errors import UsageError
from npugraph_ex.observe.installing import install_command

_NEEDED = {name: name for name in ("pytest", "hypothesis", "transformers")}
_TABLES: dict[str, Any] = {"mutants": mutants, "alarms": alarms}
"""Words that ask for a table instead of a run, and what makes it."""
_MOST_JOBS = 4
"""By default: each is a process of a gigabyte."""
_ALONE = {"--pdb", "--trace", "-s", "--capture=no"}
"""Options of pytest that want the terminal for one process."""
_DESCRIPTION = """\
Run the conformance suite: random programs around every fusion rule, streams, capture and replay, small models; eager mode,
optimised graph and replay must agree, a float64 reference judges. Other options are pytest's: -k swiglu, -x, -v.

  npugraph-ex conformance mutants          is every deliberate fault noticed? prints the kill table; 1 if one survives
  npugraph-ex conformance mutants NAME...  only these; --budget N examples for each, --markdown FILE for a page
  npugraph-ex conformance alarms           does it raise false alarms? 20,000 random programs; --examples N, --first N

profiles:
  quick     a few minutes: what runs before a change is accepted
  full      some 20 minutes on one core, 28,000 programs: a release
  nightly   some 2 hours on two cores, 300,000 programs

A new run moves the results that it finds in the report folder to DIR/earlier/1, 2 and so on. Ctrl-C ends a run at once:
what it found is printed and kept, and --resume goes on with it.

exit status: 0 all held, 1 something failed (or, with a mutant, was noticed), 2 wrong use or nothing ran, 130 after Ctrl-C,
143 after SIGTERM
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "conformance", help="run the conformance suite on this machine", description=_DESCRIPTION,
        add_help=False,
    )  # fmt: skip
    # Not argparse's own: after `mutants` or `alarms` it is the help of these that is asked for.
    parser.add_argument("-h", "--help", action="store_true", help="show this help message and exit")
    parser.add_argument("--target", choices=("emulated", "npu"), help="which device (default: emulated)")
    parser.add_argument("--profile", choices=("quick", "full", "nightly"), default="quick", help="(default: quick)")
    parser.add_argument(
        "--jobs", type=at_least(1), metavar="N",
        help=f"how many processes share the tests (default: one a core, at most {_MOST_JOBS}; 1 on a real device)",
    )  # fmt: skip
    parser.add_argument(
        "--seed", type=whole, default=0, metavar="N", help="the same seed draws the same programs (default: 0)"
    )
    parser.add_argument(
        "--report-dir", default="conformance_report", metavar="DIR",
        help="where report.html, junit.xml, cases.jsonl and failing scripts go (default: conformance_report)",
    )  # fmt: skip
    parser.add_argument("--resume", action="store_true", help="go on with the run in DIR: what passed is not run again")
    parser.add_argument("--xfails-file", metavar="FILE", help="known failures, each with the link of its report")
    parser.add_argument(
        "--mutant", metavar="NAME", help="switch a deliberate fault on: the run must then fail; `list` lists them"
    )
    parser.set_defaults(takes_further=True, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the suite in this process. ``mutants`` and ``alarms`` as first further word ask for their tables.

    Returns:
        As ``run_pytest``.

    Raises:
        UsageError: the suite cannot run here.
    """
    table = _TABLES.get(arguments.further[0]) if arguments.further else None
    if table is not None:
        words = [*arguments.further[1:], *(["--help"] if arguments.help else [])]
        own = table.parser().parse_args(words, argparse.Namespace())
        own.json, own.quiet = own.json or arguments.json, own.quiet or arguments.quiet
        _refuse_options_of_a_run(arguments)
        return int(table.run(own, target=arguments.target))
    if arguments.help:
        arguments.parser.print_help()
        return 0
    require("the suite needs", _NEEDED, "conformance")
    suite = suite_folder()
    options = [f"--profile={arguments.profile}", f"--seed={arguments.seed}", f"--report-dir={arguments.report_dir}"]
    given = {"target": arguments.target, "xfails-file": arguments.xfails_file, "mutant": arguments.mutant}
    options += [f"--{name}={value}" for name, value in given.items() if value is not None]
    options += ["--resume"] if arguments.resume else []
    options += _in_processes(arguments)
    # Not the settings of whatever project the command happens to be called in.
    own = [f"--rootdir={suite}", "-c", str(suite / "suite.ini"), "-p", "no:cacheprovider"]
    words = [str(suite), *own, *options, *arguments.further]
    status = run_pytest(
        words, arguments, after_stop="the same command with --resume runs the rest, if a test had begun"
    )
    if arguments.json:
        show(arguments, {"status": status, **_found(Path(arguments.report_dir))}, "")
    return status


def _found(folder: Path) -> dict[str, object]:
    """What a run wrote into its folder: the files, and the tests by outcome."""
    files = {
        name: str(folder / name) for name in ("report.html", "junit.xml", "cases.jsonl") if (folder / name).is_file()
    }
    if "junit.xml" not in files:
        return {"tests": 0, "failed": [], "skipped": 0, "files": files}
    tests = list(ET.parse(files["junit.xml"]).iter("testcase"))  # noqa: S314 - the suite's own file
    named = {
        outcome: [_named(test) for test in tests if test.find(outcome) is not None] for outcome in ("failure", "error")
    }
    skipped = sum(test.find("skipped") is not None for test in tests)
    return {"tests": len(tests), "failed": [*named["failure"], *named["error"]], "skipped": skipped, "files": files}


def _named(test: ET.Element) -> str:
    return f"{test.get('classname')}::{test.get('name')}"


def _refuse_options_of_a_run(arguments: argparse.Namespace) -> None:
    """An option that a table does not take would otherwise do nothing, and nobody would know."""
    for name in ("profile", "jobs", "seed", "report_dir", "resume", "xfails_file", "mutant"):
        if getattr(arguments, name) != arguments.parser.get_default(name):
            table = arguments.further[0]
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"conformance {table} takes no {option}; `conformance {table} --help` lists what it takes")


def _in_processes(arguments: argparse.Namespace) -> list[str]:
    """The options of pytest for the number of processes, each of which gets its share of the cores; none for one."""
    jobs, can_share, cores = arguments.jobs, find_spec("xdist") is not None, len(os.sched_getaffinity(0))
    if jobs is None:
        own = arguments.target == "npu" or not can_share or not _ALONE.isdisjoint(arguments.further)
        jobs = 1 if own else min(cores, _MOST_JOBS)
    if jobs > 1 and not can_share:
        raise UsageError(f"conformance --jobs needs pytest-xdist: {install_command('conformance')}")
    if jobs == 1:
        return []
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // jobs)))  # threads without a core wait by spinning
    return [f"-n{jobs}", "--dist=worksteal"]


def suite_folder() -> Path:
    """The folder of the suite's tests, in a checkout or installed."""
    found = find_spec("npugraph_ex_conformance")
    if found is None or found.origin is None:
        raise UsageError("the package npugraph_ex_conformance is missing; install npugraph-ex anew")
    return Path(found.origin).parent / "tests"
