"""`npugraph-ex advise SCRIPT`: what in its models could be fused and is not, what that would win, and what to change."""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TextIO

from npugraph_ex._plurals import counted
from npugraph_ex.commands import ranks
from npugraph_ex.commands.output_files import output_file
from npugraph_ex.commands.terminal import say_written
from npugraph_ex.console.progress import progress
from npugraph_ex.observe import NOTHING_COMPILED
from npugraph_ex.observe.modelled import modelled_us

if TYPE_CHECKING:
    from torch import fx

    from npu_emulator.pages import Page
    from npugraph_ex.config import Options
    from npugraph_ex.console.interrupts import Interrupt
    from npugraph_ex.discovery.rules import RuleVerdict
    from npugraph_ex.discovery.search import Discovery
    from npugraph_ex.frontend.entry.advice import Advice
    from npugraph_ex.graph.launches import Launched
    from npugraph_ex.report.passes import PassRecord, PassReport

_DESCRIPTION = """\
Run a script, then say what in its compiled graphs could be fused and is not: the line of the model, kernels and modelled time
that a call would save, and the option to set or the lines to change.

examples:
  npugraph-ex advise --emulate script.py
  npugraph-ex advise --emulate --html advice.html script.py
  npugraph-ex advise --emulate --json script.py > advice.json
  npugraph-ex advise --emulate --discover found_rules.py script.py

Call the model under torch.no_grad() or torch.inference_mode(): of a graph that is trained no weights are joined, for a joined
weight would not follow a step. Each graph is compiled twice.

exit status: the script's; 130 after Ctrl-C, 143 after SIGTERM, with the advice for what was compiled so far
"""
_EXAMPLES = 60
"""Random programs for each rule that a search found."""
_LINES = 4
"""Of progress in a file, for each graph that is searched."""
_KINDS = {
    "option": ("Won by an option", "Each row is one fusion at one line of the model."),
    "declaration": (
        "Won by a declaration",
        "An option that says of the model what no graph proves: set it if it is so. A row of other lines may win the same.",
    ),
    "spelling": (
        "Won by other lines in the model",
        "The lines show a form, with names of their own.",
    ),
    "uncounted": (
        "Other lines in the model, which nobody counted",
        "They bring a form, with names of their own. What that wins shows when the model has them.",
    ),
    "refused": ("Refused", "What resembles a fusion and stays, with the reason."),
}
_SHARED = (
    "Of a shared projection, write the lines before the row's statement, and each y in place of the expression that "
    "the last line names; it is for inference. options={'lift': 'judged', 'join_projections': True} joins most of them "
    "without other lines."
)
_BELOW_ZERO = "A row below zero has what the lines cost in a graph in which they are no form."


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Add the subcommand, without what all that run a script have in common."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "advise", help="run a script, then say what could be fused in its models, and what to change for it",
        description=_DESCRIPTION,
    )  # fmt: skip
    parser.add_argument("--html", type=output_file, metavar="FILE", help="also write it as a page")
    parser.add_argument(
        "--discover", type=output_file, metavar="FILE",
        help="also search the records of all operators for what no rule knows (minutes), and write it as rules, each validated",
    )  # fmt: skip
    parser.add_argument("--emulate", action="store_true", help="on an emulated NPU")
    return parser


@contextmanager
def advised(arguments: argparse.Namespace, out: TextIO, stop: Interrupt) -> Iterator[None]:
    """Watch what the block compiles; at its end, even after an error, print the advice.

    Rules that were found are validated unless somebody has asked to ``stop``.
    """
    found = Advised()
    try:
        with advising(discovering=arguments.discover is not None, quiet=arguments.quiet) as found:
            yield
    finally:
        with ranks.output(arguments, out) as shown:
            _tell(arguments, found, shown)
        if arguments.discover is not None:
            _write_rules(arguments, found.rules, stop)


def _tell(arguments: argparse.Namespace, found: Advised, out: TextIO) -> None:
    """Print the advice, and write the page that was asked for."""
    page = _page(Path(arguments.script).name, found, arguments.discover)
    if arguments.json:
        told = [asdict(one) | {"modelled_us": modelled_us(one.saves)} for one in found.over_all_graphs()]
        for one in told:
            del one["costs"]
        kernels, time = found.kernels_and_us()
        every = {
            "graphs": found.graphs,
            "trained": found.trained,
            "kernels": kernels,
            "modelled_us": time,
            "rolled_back": [{"graph": number, "pass": one.name, "why": one.message} for number, one in found.undone],
            "advice": told,
        }
        out.write(json.dumps(every, indent=1) + "\n")
    else:
        with redirect_stdout(out):
            sys.stdout.write(f"\n{page}\n")
    if arguments.html is not None:
        arguments.html.write_text(page.html(), encoding="utf-8")
        say_written(arguments, arguments.html)


def _write_rules(arguments: argparse.Namespace, found: Sequence[Discovery], stop: Interrupt) -> None:
    """Write what a search found, validate it, and write it again with what that says."""
    from npugraph_ex.discovery.rules import distinct, module_of

    rules = distinct(found)
    arguments.discover.write_text(module_of(rules), encoding="utf-8")
    say_written(arguments, arguments.discover, f", {counted(len(rules), 'rule')}")
    verdicts = _validated(arguments) if rules and not stop.number else {}
    if verdicts:
        arguments.discover.write_text(module_of(rules, verdicts), encoding="utf-8")
        good = sum(verdict.ok for verdict in verdicts.values())
        say_written(arguments, arguments.discover, f", {good} of {counted(len(rules), 'rule')} validated")


def _validated(arguments: argparse.Namespace) -> dict[str, RuleVerdict]:
    """What `npugraph-ex validate` says of a file's rules; nothing where it cannot run, which it says itself.

    In a process of its own: the rules of this one are the script's.
    """
    from npugraph_ex.discovery.rules import RuleVerdict

    command = [sys.executable, "-m", "npugraph_ex", "validate", str(arguments.discover), "--json"]
    command += [f"--max-examples={_EXAMPLES}"]
    command += ["--target=emulated"] * arguments.emulate + ["--quiet"] * arguments.quiet
    with TemporaryDirectory() as reports:
        command += [f"--report-dir={reports}"]
        ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)  # noqa: S603 - this package's own command
    try:
        replacements = json.loads(ran.stdout)["replacements"]
    except ValueError:
        return {}
    return {
        one["rule"].rpartition(".")[2]: RuleVerdict(
            one["ok"], "; ".join([one["verdict"], *(it["text"] for it in one["findings"] if it["kind"] != "proven")])
        )
        for one in replacements
    }


@dataclass
class Advised:
    """What a block's graphs would win.

    Attributes:
        graphs: how many it compiled.
        trained: how many of these have a backward.
        advice: on each of them.
        rules: that a search found.
        undone: passes that were rolled back, each with its graph, in either compilation.
        won: what the options win: the work of the graphs as they are, less that of their second compilations.
    """

    graphs: int = 0
    trained: int = 0
    advice: list[Advice] = field(default_factory=list)
    rules: list[Discovery] = field(default_factory=list)
    undone: list[tuple[int, PassRecord]] = field(default_factory=list)
    won: Launched | None = None

    def over_all_graphs(self) -> list[Advice]:
        """The advice, where what lines cost in other graphs counts."""
        from npugraph_ex.frontend.entry.advice import over_all_graphs

        return over_all_graphs(self.advice)

    def kernels_and_us(self) -> tuple[int, float]:
        """Won by options, as measured, and by other lines."""
        every = self.over_all_graphs()
        rows = [one.saves for one in every if one.kind == "spelling" or (one.kind == "option" and self.won is None)]
        all_won = [*rows, *([] if self.won is None else [self.won])]
        return sum(one.kernels for one in all_won), round(sum(map(modelled_us, all_won)), 2)


@contextmanager
def advising(*, discovering: bool = False, quiet: bool = True) -> Iterator[Advised]:
    """Collect advice on each graph that the block compiles; ``discovering``: and rules, from the operators' records.

    Both are there as soon as they are found. Unless ``quiet``, stderr tells how far a search for rules is.
    """
    from torch import fx

    from npugraph_ex import npu_fx_compiler
    from npugraph_ex.frontend.entry.advice import advice_on
    from npugraph_ex.graph.launches import Launched
    from npugraph_ex.report import graphs

    found = Advised()
    original = npu_fx_compiler._optimize_fx  # noqa: SLF001 - the name by which clients see each graph

    def optimise(gm: fx.GraphModule, example_inputs: Sequence[Any], compilation: Any) -> PassReport:
        traced, searched = (fx.GraphModule(gm, copy.deepcopy(gm.graph)) for _ in range(2))
        number = graphs.graphs_so_far() + 1
        report: PassReport = original(gm, example_inputs, compilation)

        def compiled(copied: fx.GraphModule, options: Options) -> PassReport:
            again = replace(compilation, options=options, dumper=None, so_far=None, report=None)
            made: PassReport = original(copied, example_inputs, again)
            undone = {one.name: one for one in (*made.rolled_back, *report.rolled_back)}
            found.undone += [(number, one) for one in undone.values()]
            more = Launched.of_graph(gm.graph) - Launched.of_graph(copied.graph)
            found.won = more if found.won is None else found.won + more
            return made

        found.graphs += 1
        found.trained += compilation.trained
        found.advice += advice_on(
            number, traced, compilation.options, report, compiled, names=compilation.names, trained=compilation.trained
        )
        if discovering and not compilation.trained:  # last, for it takes minutes, in which somebody may stop it
            _discover(searched, {node.name for node in gm.graph.nodes}, number, found.rules, quiet=quiet)
        return report

    npu_fx_compiler._optimize_fx = optimise  # noqa: SLF001
    try:
        yield found
    finally:
        npu_fx_compiler._optimize_fx = original  # noqa: SLF001


def _discover(traced: fx.GraphModule, left: set[str], number: int, rules: list[Discovery], *, quiet: bool) -> None:
    """Add the rules that save kernels of a graph beside those that the passes save, which leave the nodes ``left``."""
    from npugraph_ex.discovery.rules import distinct
    from npugraph_ex.discovery.search import discover
    from npugraph_ex.graph.launches import Launched

    def on_found(one: Discovery) -> None:
        there = [node for node in traced.graph.nodes if node.name in left.intersection(one.nodes)]
        if (Launched.of(there) - Launched.of(one.fused.nodes)).kernels > 0:
            rules.append(one)

    with progress(None, quiet=quiet, lines=_LINES) as bar:

        def reached(done: int, of: int) -> None:
            bar(done, f"nodes of graph {number}, {counted(len(distinct(rules)), 'rule')}", of)

        discover(traced, on_found=on_found, reached=reached)


def _page(script: str, found: Advised, discovered: Path | None = None) -> Page:
    """Options, spellings and refusals, the most kernels first; ``discovered`` has the rules that a search found."""
    from npu_emulator.pages import Page, PageTable, Section, Verbatim

    if not found.graphs:
        return Page(f"Advice for {script}", [], NOTHING_COMPILED)
    sections, advice = [], found.over_all_graphs()
    for kind, (title, text) in _KINDS.items():
        mine = sorted((one for one in advice if _section(one) == kind), key=lambda one: -one.saves.kernels)
        first = 2 * (kind == "uncounted")  # the first columns are what a row wins
        heads = ("kernels", "modelled us", "times", "graph", "fusion", "line")[first:]
        blocks = [PageTable(heads, [row[first:] for row in _rows(mine)])]
        changes: dict[str, list[Advice]] = {}
        for one in mine:
            changes.setdefault(f"# {one.why}\n{one.change}" if one.why else one.change, []).append(one)
        told = [
            Verbatim(f"{', '.join(dict.fromkeys(one.rule for one in those))}:\n{change}")
            for change, those in changes.items()
        ]
        sections.append(Section(title, [*blocks, *told] if mine else [], _about(mine, text)))
    undone = [Verbatim(f"graph {number}: {one.undone()}") for number, one in found.undone]
    sections.append(Section("Passes that were rolled back", undone))
    won = [one for one in advice if _section(one) in {"option", "spelling"}]
    more = any(_section(one) == "uncounted" for one in advice)
    kernels, time = found.kernels_and_us()
    verdict = f"{counted(kernels, 'kernel')} and {time:.2f} modelled us less in a call of each graph."
    if kernels != sum(one.saves.kernels for one in won):
        verdict += " Each row counts its fusion by itself."
    if discovered is not None and found.rules:
        from npugraph_ex.discovery.rules import distinct

        rules = counted(len(distinct(found.rules)), "rule")
        most = counted(max(one.saves.kernels for one in found.rules), "kernel")
        searched = f"The search found {rules} more, at most {most} less at one place: {discovered} has them."
        verdict = f"{verdict} {searched}" if won else searched
    elif not won and not undone:
        verdict = f"There is nothing to win that is {'counted' if more else 'known'} here."
    if undone:
        verdict += f" Passes that were rolled back, so that what they win is missing: {len(undone)}."
    if found.trained:
        verdict += f" Trained graphs, in which nothing is lifted or joined: {found.trained} of {found.graphs}."
    return Page(f"Advice for {script}", sections, verdict)


def _section(one: Advice) -> str:
    """Where a piece of advice stands: of some lines nobody counted what they win."""
    return "uncounted" if one.kind == "spelling" and not one.saves.kernels else one.kind


def _about(advice: Sequence[Advice], text: str) -> str:
    """What a section's rows mean, as far as there are such rows."""
    shared = any(one.rule == "shared projection" for one in advice)
    below = any(one.saves.kernels < 0 for one in advice)
    alone = shared and all(one.rule == "shared projection" for one in advice)
    return " ".join([_SHARED] * shared + [text] * (not alone) + [_BELOW_ZERO] * below)


def _rows(advice: Sequence[Advice]) -> list[tuple[object, ...]]:
    """A row for each fusion at a line; of a function that was compiled several times one, with graphs and the range of times."""
    joined: dict[tuple[object, ...], Advice] = {}
    for one in advice:
        place = one.graph, one.rule, one.source
        had = joined.get(place)
        joined[place] = one if had is None else replace(one, times=had.times + one.times, saves=had.saves + one.saves)
    alike: dict[tuple[object, ...], list[Advice]] = {}
    for one in sorted(joined.values(), key=lambda one: -one.saves.kernels):
        alike.setdefault((one.saves.kernels, one.times, one.rule, one.source), []).append(one)
    rows: list[tuple[object, ...]] = []
    for first, *others in alike.values():
        won = sorted({f"{modelled_us(one.saves):.2f}" for one in (first, *others)}, key=float)
        us = " to ".join(dict.fromkeys((won[0], won[-1])))
        numbers = [str(number) for number in sorted({one.graph for one in (first, *others)})]
        graphs = ", ".join(numbers) + (f" ({len(numbers)} graphs)" if others else "")
        rows.append((first.saves.kernels, us, first.times, graphs, first.rule, _lines(first.source)))
    return rows


def _lines(source: str) -> str:
    """``model.py:3, model.py:4`` as ``model.py:3, 4``: a path may be longer than a terminal."""
    files: dict[str, list[str]] = {}
    for place in source.split(", "):
        file, _, line = place.rpartition(":")
        files.setdefault(file, []).append(line)
    return ", ".join(f"{file}:{', '.join(lines)}" if file else lines[0] for file, lines in files.items())
