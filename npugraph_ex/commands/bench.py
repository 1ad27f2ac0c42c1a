"""`npugraph-ex bench`: finds the benches and runs them with pytest; further words are pytest's own options."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import npugraph_ex
from npugraph_ex.commands.numbers import at_least
from npugraph_ex.commands.output_files import output_file
from npugraph_ex.commands.suites import HowFar, require, run_pytest
from npugraph_ex.commands.terminal import completes, show
from npugraph_ex.errors import UsageError

_NEEDED = {
    "pytest": "pytest",
    "pytest_benchmark": "pytest-benchmark",
    "tabulate": "tabulate",
    "transformers": "transformers",
}
TOPICS = {
    "call": "test_host_cost.py",
    "compile": "test_compile_time.py",
    "device": "test_device_work.py",
    "sizes": "test_recapture.py",
    "matching": "test_matching.py",
    "passes": "test_pass_cost.py",
    "streams": "test_stream_check.py",
    "suite": "test_suite_speed.py",
    "emulator": "test_emulator_cost.py",
    "collectives": "test_collectives.py",
    "single": "test_calls.py",
    "architectures": "test_architectures.py",
    "layers": "test_real_layers.py",
}
_DESCRIPTION = """\
Measure the compiler on this machine, beside the floor and beside the backend that torch_npu carries, and print tables.
No number of seconds is ever promised, only ratios and counts. Ctrl-C ends it at once: the tables so far are printed, and
saved beside the file that --save names, as NAME.interrupted.json.

exit status: 0 all is as promised, 1 a ratio or a count is worse, 2 wrong use or nothing ran, 130 after Ctrl-C

topics (all of them if none is named):
  call       host time of a replayed call, and where it goes     matching   the checked matcher beside torch's own
  compile    time to the first result, cold and warm             passes     the passes over graphs of 16,000 nodes
  device     kernels, copies, bytes; by pass; modelled speed-up  streams    the stream check
  sizes      new sizes, old sizes, 10,000 calls                  suite      examples a second of the conformance suite
  emulator   what the emulated device costs                      single     single calls, by pytest-benchmark
  collectives     all-reduce between emulated processes beside gloo's, and ranks that wait
  architectures   models of transformers, a UNet, a DiT: kernels, bytes, errors with lift="judged"
  layers          a layer of Qwen3-8B, Qwen3-30B-A3B and DeepSeek-V3 at its real size, batch 1 to 256

examples:
  npugraph-ex bench call device
  npugraph-ex bench --save before.json               ... change something ...
  npugraph-ex bench --compare before.json            each figure, and how many times the earlier one it is
  npugraph-ex bench single --benchmark-autosave      pytest-benchmark's own files; then --benchmark-compare
  npugraph-ex bench --compare before.json --worse 10       the same; 10 % worse than the earlier one fails
  npugraph-ex bench --page tables.md                 the tables in Markdown, as in the documentation
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "bench", help="measure calls, compilation and device work; print tables", description=_DESCRIPTION,
    )  # fmt: skip
    topics = parser.add_argument("topics", nargs="*", metavar="topic", help="what to measure (default: everything)")
    completes(topics, lambda: TOPICS)
    parser.add_argument(
        "--save",
        type=output_file,
        metavar="FILE",
        default="bench_report.json",
        help="where the figures go (default: bench_report.json)",
    )
    parser.add_argument("--compare", metavar="FILE", help="what an earlier --save or --page (*.md) wrote")
    parser.add_argument(
        "--worse",
        metavar="PERCENT",
        type=at_least(0),
        help="fail where a ratio or a count is worse than in --compare by more than this",
    )
    parser.add_argument(
        "--history", type=output_file, metavar="FILE", help="add the figures to this file, one line of JSON a run"
    )
    parser.add_argument(
        "--page",
        type=output_file,
        metavar="FILE",
        help="also write the tables, as Markdown or, if it ends in .html, as a page",
    )
    parser.set_defaults(takes_further=True)


def run(arguments: argparse.Namespace) -> int:
    """Run the benches in this process.

    Returns:
        As ``run_pytest``.

    Raises:
        UsageError: a topic or a file that there is not, or something that is not installed.
    """
    unknown = [topic for topic in arguments.topics if topic not in TOPICS]
    if unknown:
        raise UsageError(f"there is no topic {unknown[0]!r}; there are {', '.join(TOPICS)}")
    if arguments.compare and not Path(arguments.compare).is_file():
        raise UsageError(
            f"--compare takes a file that an earlier bench --save wrote; there is no file {arguments.compare!r}"
        )
    if arguments.worse is not None and not arguments.compare:
        raise UsageError("--worse says how much worse than the figures of --compare; add --compare FILE")
    require("the benches need", _NEEDED, "benches")
    home = benches_folder()
    files = [str(home / TOPICS[topic]) for topic in arguments.topics or TOPICS]
    # Paths of this folder: pytest resolves options against the one that it is told is the project's.
    options = [f"--tables={arguments.save.resolve()}"]
    options += [f"--tables-against={Path(arguments.compare).resolve()}"] if arguments.compare else []
    options += [f"--tables-worse={arguments.worse}"] if arguments.worse is not None else []
    options += [f"--tables-history={arguments.history.resolve()}"] if arguments.history else []
    options += [f"--tables-page={arguments.page.resolve()}"] if arguments.page else []
    own = [f"--rootdir={home}", "-c", str(home / "benches.ini"), "-p", "no:cacheprovider"]
    # Files before options: one such as --benchmark-compare would take the first of them for its own.
    words = [*own, *files, *options, *arguments.further]
    status = run_pytest(words, arguments, plugins=[HowFar(quiet=arguments.quiet)])
    if arguments.json and arguments.save.is_file():
        show(arguments, json.loads(arguments.save.read_text(encoding="utf-8")), "")
    return status


def benches_folder() -> Path:
    """The benches: beside the library in a checkout, inside it when it was installed."""
    home = Path(npugraph_ex.__file__).parent
    for folder in (home / "_benches", home.parent / "benches"):
        if (folder / "conftest.py").is_file():
            return folder
    raise UsageError(f"the benches are not in {home}; reinstall npugraph-ex, or run them from a checkout")
