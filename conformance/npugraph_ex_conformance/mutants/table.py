"""The kill table: what the suite says of each deliberate fault, and how many examples it took to say it."""

from __future__ import annotations

from collections.abc import Sequence

from tabulate import tabulate

from npugraph_ex._plurals import counted
from npugraph_ex_conformance.corpus.programs import CORPUS
from npugraph_ex_conformance.mutants.search import BUDGET, Kill

_MESSAGE = 100


def summary(kills: Sequence[Kill]) -> str:
    """One line: how many were killed, and how quickly."""
    counts = sorted(done.examples for done in kills if done.examples is not None)
    survivors = [done.mutant for done in kills if done.examples is None]
    middle = counts[len(counts) // 2] if counts else 0
    return (
        f"{len(counts)} of {counted(len(kills), 'mutant')} killed, half of them within {counted(middle, 'example')}, "
        f"the slowest within {counts[-1] if counts else 0} of {BUDGET}; "
        f"{sum(done.seconds for done in kills):.0f} s of processor time"
        + (f"; SURVIVED: {', '.join(survivors)}" if survivors else "")
    )


def plain(kills: Sequence[Kill]) -> str:
    """The table for a terminal."""
    rows = [
        (done.mutant, done.family, done.examples or "SURVIVED", f"{done.seconds:.1f}", _shortened(done.message))
        for done in kills
    ]
    headers = ("mutant", "examples of", "killed by number", "s", "what was said")
    text: str = tabulate(rows, headers=headers, tablefmt="simple", disable_numparse=True)
    return text


def markdown(kills: Sequence[Kill], counted: str) -> str:
    """The table as a page's part: which promise each fault breaks, and the example that noticed."""
    rows = [(f"`{done.mutant}`", done.breaks, done.family, done.examples or "**survived**") for done in kills]
    known = [(bug.name, f"<{bug.link}>", f"`{bug.mutant}`") for bug in CORPUS]
    headers = ("mutant", "the promise that it breaks", "examples of", "killed by example")
    return "\n\n".join(
        (
            _marked("mutants", f"{counted}\n\n{tabulate(rows, headers=headers, tablefmt='github')}"),
            "## Known bugs, and the mutant that brings each back",
            _marked("bugs", tabulate(known, headers=("what went wrong elsewhere", "reported", "mutant"), tablefmt="github")),
        )
    )  # fmt: skip


def _marked(name: str, table: str) -> str:
    """A table with the marks by which the Chinese page takes it over (docs/languages.py)."""
    return f"<!-- table of {name} -->\n{table}\n<!-- end of the table of {name} -->"


def _shortened(message: str) -> str:
    line = " ".join(message.split())
    return line if len(line) <= _MESSAGE else f"{line[: _MESSAGE - 1]}…"
