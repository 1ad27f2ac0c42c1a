"""Draws programs, checks them, and keeps the books. Knows the toolkit; knows no particular test."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from npugraph_ex._plurals import counted
from npugraph_ex_conformance.results import Books, Entry, Failure, Slowest

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from npugraph_ex.report.passes import PassReport
    from npugraph_ex.testing import Case, Outcome, Program, Target
    from npugraph_ex.testing.generator.strategies import Maker


@dataclass(frozen=True)
class Profile:
    """How many examples each kind of test draws: the passes alone, traced graphs, torch.compile; which decoders run."""

    passes: int
    planted_passes: int
    planted: int
    near_miss: int
    integers: int
    compiled: int
    tokens: int
    streams: int
    shared_pool: int
    callers: int
    spellings: int
    ranks: int
    rank_decoders: tuple[str, ...]
    decoders: tuple[tuple[str, bool], ...]
    dynamic: tuple[tuple[str, bool], ...]


FAMILIES = ("llama", "qwen3", "deepseek")
"""The decoders of `decoders.py`."""
DECODERS = tuple((family, quantised) for family in FAMILIES for quantised in (False, True))
"""Each of them as it is, and quantised."""

PROFILES = {
    "quick": Profile(
        passes=200, planted_passes=4, planted=6, near_miss=4, integers=50, compiled=2, tokens=12, streams=34,
        shared_pool=10, callers=24, spellings=50, ranks=3, rank_decoders=("tensor",),
        decoders=(("llama", False), ("deepseek", True)), dynamic=(("llama", False),),
    ),
    # Some 900 s of processor time: 17 programs a second planted, 41 integers, 159 through the passes alone, and the models.
    "full": Profile(
        passes=5000, planted_passes=60, planted=80, near_miss=40, integers=2000, compiled=40, tokens=32,
        streams=4000, shared_pool=300, callers=1000, spellings=2000, ranks=40, rank_decoders=("tensor", "experts"),
        decoders=DECODERS, dynamic=DECODERS,
    ),
    # Ten times that.
    "nightly": Profile(
        passes=60000, planted_passes=700, planted=900, near_miss=450, integers=24000, compiled=450, tokens=64,
        streams=48000, shared_pool=3600, callers=12000, spellings=24000, ranks=400,
        rank_decoders=("tensor", "experts"), decoders=DECODERS, dynamic=DECODERS,
    ),
}  # fmt: skip
_SHARES = {"transpose_batchmatmul": 8}
"""Of a pattern whose operands are so large that a program costs as much as eight others, one in eight is drawn."""
_FEWEST = 3
_WARM_UP = 5


@dataclass
class Run:
    """One run of the suite: what it runs on and what has come of it so far.

    Attributes:
        target: the device.
        profile: how many examples.
        seed: the same seed gives the same examples.
        books: what has happened.
        mutant: the deliberate fault that is on.
        test: the id of the test that runs now.
        models: tables that the test that runs now has added.
        failure: what is known of the failure of the test that runs now.
        slowest: the example that took longest in this process.
        checked: how many programs this process has run on the device.
        folder: where the scripts of failures go; None for a folder of the current one.
    """

    target: Target
    profile: Profile
    seed: int
    books: Books
    folder: Path | None = None
    mutant: str | None = None
    test: str = ""
    models: list[dict[str, Any]] = field(default_factory=list)
    failure: Failure | None = None
    slowest: tuple[float, Case] | None = None
    checked: int = 0
    on_example: Callable[[], None] = lambda: None

    def begin(self, test: str) -> None:
        """A test begins."""
        self.test = test
        self.models.clear()
        self.failure = None

    def timed_slowest(self) -> Slowest | None:
        """The slowest example of this process, run once more for its timeline."""
        if self.slowest is None or self.target.kind != "emulated":
            return None
        from npugraph_ex.testing.generator.client_operators import client_operators
        from npugraph_ex_conformance.reporting.modelled import modelled_spans

        seconds, case = self.slowest
        with client_operators():  # which the tests have put away by now
            eager, replayed = (tuple(span._asdict() for span in spans) for spans in modelled_spans(case))
        return Slowest(seconds, case.source, eager, replayed)

    def record(self, what: str, program: Program, case: Case, outcome: Outcome, seconds: float) -> None:
        """Enter one example into the books."""
        self.books.add(
            Entry(
                self.test, what, program.dtype, program.dynamic, program.near_miss, case.route, round(seconds, 4),
                outcome.fusions, case.expected, outcome.worst_ulp, outcome.near_misses, tuple(outcome.failures),
                program.source, changing_passes(outcome.report), f"{_KINDS[case.route]}, {_family(program)}", outcome.eager_ulp,
            )
        )  # fmt: skip
        # What goes through torch.compile takes longest for Dynamo's sake, which is of no interest here; nor is what the first
        # programs of a process take, which pay for all that is set up once.
        self.checked += case.route == "graph"
        timed = case.route == "graph" and case.runs and outcome.ok and self.checked > _WARM_UP
        if timed and seconds > (self.slowest or (0.0,))[0]:
            self.slowest = (seconds, case)
        self.on_example()

    @contextmanager
    def entered(self, what: str, *, source: str = "", kind: str = "streams") -> Iterator[list[PassReport]]:
        """Enter the int32 program that is checked within the block; its compilations' reports are appended.

        Args:
            what: the row of the table.
            source: the program.
            kind: of program, which is also the line of the table of rates.
        """
        start, failures = time.process_time(), tuple[str, ...]()
        reports: list[PassReport] = []
        try:
            yield reports
        except Exception as error:
            failures = (str(error),)
            raise
        finally:
            passes = dict.fromkeys(name for report in reports for name in changing_passes(report))
            seconds = round(time.process_time() - start, 4)
            self.books.add(
                Entry(
                    self.test, what, "int32", False, None, kind, seconds, 0, None, 0.0, (), failures, source,
                    tuple(passes), kind,
                )
            )  # fmt: skip
            self.on_example()

    def check_examples(self, example: Callable[[int], str], examples: int, *, what: str, kind: str) -> None:
        """Check so many examples of a function that says what is wrong; the run's seed decides which.

        Args:
            example: checks the example of a number.
            examples: how many.
            what: the row of the table.
            kind: the line of the table of rates.
        """
        for number in range(examples):
            chosen = self.seed * 1_000_003 + number
            with self.entered(what, source=f"{getattr(example, '__name__', example)}({chosen})", kind=kind):
                message = example(chosen)
                assert not message, message

    def explore(
        self, name: str, strategy: SearchStrategy[Any] | Maker, *, examples: int, route: str = "graph", what: str
    ) -> None:
        """Check so many drawn programs; the first failure is shrunk and ends the test with its script.

        Args:
            name: of the test; with the run's seed it decides the examples.
            strategy: of programs; or a maker, which is sampled.
            examples: how many; fewer of an expensive pattern.
            route: as in ``Case``.
            what: the row of the table.
        """
        from npugraph_ex.testing import find_failure

        examples = max(min(examples, _FEWEST), examples // _SHARES.get(what, 1))
        failure = find_failure(
            strategy, examples=examples, seed=f"{self.seed}:{name}", route=route,
            on_case=lambda *seen: self.record(what, *seen),
        )  # fmt: skip
        if failure is not None:
            self.end_with(name, *failure)

    def end_with(self, name: str, case: Case, outcome: Outcome, script: Callable[..., str] | None = None) -> NoReturn:
        """End the test with a failure that was made small, and with the script that reproduces it.

        Args:
            name: of the test.
            case: the smallest that fails.
            outcome: what came of it.
            script: makes the script's text; ``script_of`` if None.
        """
        from npugraph_ex.testing import find_guilty, script_of
        from npugraph_ex.testing.failures.script import write_script

        guilty, operators = find_guilty(case), case.source.count("torch.ops.")
        text, folder = (script or script_of)(case, outcome, guilty=guilty), self.folder or Path("reports/conformance")
        path = write_script(text, folder, _file_name(name))
        self.failure = Failure(outcome.failures[0], guilty, operators, case.source, f"{folder.name}/{path.name}")
        pytest.fail(
            f"{outcome.failures[0]}\nguilty: {guilty}\n"
            f"shrunk to {counted(operators, 'operator')}; this script reproduces it ({path}):\n\n{text}",
            pytrace=False,
        )


_KINDS = {"fx": "passes alone", "graph": "compile, capture, three replays", "compile": "through torch.compile"}


def _family(program: Program) -> str:
    return "integers" if program.pattern is None else "planted" if program.near_miss is None else "near-miss"


def changing_passes(report: PassReport | None) -> tuple[str, ...]:
    """The passes that changed the graph."""
    return () if report is None else tuple(record.name for record in report.passes if record.outcome == "changed")


def _file_name(name: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in name).strip("_")
