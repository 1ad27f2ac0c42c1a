"""The suite notices deliberate faults: every mutant is killed by random examples, every known bug by its own program."""

from __future__ import annotations

from pathlib import Path

import pytest

from npugraph_ex import testing
from npugraph_ex.testing import Case, Program, mutation
from npugraph_ex.testing.generator.strategies import Maker
from npugraph_ex_conformance.corpus.known_bug import KnownBug, shows
from npugraph_ex_conformance.corpus.programs import CORPUS
from npugraph_ex_conformance.examples import FAMILIES
from npugraph_ex_conformance.mutants.search import BUDGET, Kill, kill

TABLE = Path(__file__).parents[2] / "docs" / "reference" / "mutants.md"
FROM_RANDOM_PROGRAMS = {
    name for name in FAMILIES if name not in {"streams", "parts", "forms", "random numbers", "updates", "cache"}
}
RULE = "add_rms_norm_dynamic_quant"
SOURCES: dict[str, tuple[Maker, str]] = {
    "planted": (testing.planted_programs(pattern=RULE), "fx"),
    "near-miss": (testing.planted_programs(pattern=RULE, near_miss=True), "fx"),
    "exact": (testing.exact_programs(), "fx"),
    "device": (testing.exact_programs(dynamic=False), "graph"),
}
SHRUNK = (
    "quant-subtracts-residual", "quant-drops-epsilon", "fusion-ignores-writes-between", "noop-removal-ignores-writes",
    "reinplace-ignores-overlap", "cat-takes-dimension-zero", "replay-overwrites-results", "replay-ignores-addresses",
)  # fmt: skip
"""Of these the failing program is made small, too."""


def _rows() -> list[list[str]]:
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    return [[cell.strip(" `") for cell in line.split("|")[1:5]] for line in lines if line.startswith("| `")]


KILLED_BY = {name: int(example) for name, _, _, example in _rows()}
"""The example that the documentation names: where it still fails, nothing is searched."""


@pytest.mark.slow
@pytest.mark.parametrize("name", testing.mutants())
def test_every_mutant_is_killed(name: str) -> None:
    """With the fault on, some example fails within the budget; without it, the same example is right."""
    done = kill(name, first=KILLED_BY.get(name, 1))
    assert done.examples is not None, f"{name} survived {BUDGET} examples of {done.family}"
    assert FAMILIES[done.family](done.examples - 1) == ""
    if name in SHRUNK:
        _check_that_it_becomes_small(done, done.examples)


def _check_that_it_becomes_small(done: Kill, examples: int) -> None:
    """What is left has at most six operators, fails as the first program did, and only because of the fault."""
    maker, route = SOURCES[done.family]
    program = testing.sample(maker, examples - 1)

    with testing.mutant(done.mutant):
        kind = testing.check(Case.of(program, route=route)).kind

        def fails(candidate: Program) -> bool:
            outcome = testing.check(Case.of(candidate, route=route))
            return not outcome.ok and outcome.kind == kind

        small = testing.shrink(program, fails)
        assert len(small.steps) <= min(6, len(program.steps)), small
        assert fails(small)
    assert testing.check(Case.of(small, route=route)).ok


def test_every_kind_of_example_kills_a_mutant() -> None:
    """There are no examples that no fault is looked for with; those in turn are the spellings in another order."""
    assert {mutant.found_by for mutant in testing.mutants().values()} == set(FAMILIES) - {"spellings in turn"}


def test_the_documentation_lists_every_mutant() -> None:
    """The table is the one that `npugraph-ex conformance mutants --markdown docs/reference/mutants.md` writes today."""
    assert [row[:3] for row in _rows()] == [[m.name, m.breaks, m.found_by] for m in testing.mutants().values()]


@pytest.mark.parametrize("bug", CORPUS, ids=lambda bug: bug.mutant)
def test_a_known_bug_is_noticed_when_it_comes_back(bug: KnownBug) -> None:
    """Its program is right as things are, and fails with the fault."""
    right, wrong = shows(bug)
    assert right == ""
    assert wrong


def test_random_programs_find_a_dozen_known_bugs() -> None:
    """The programs of the corpus are not needed: random ones kill at least twelve of its mutants, as tested above."""
    found = {bug.mutant for bug in CORPUS if testing.mutants()[bug.mutant].found_by in FROM_RANDOM_PROGRAMS}
    assert len(found) >= 12


def test_a_mutant_leaves_nothing_behind() -> None:
    """After the block the right code is back, whatever happened in it."""
    from npugraph_ex.fusion import checks

    right = checks.undisturbed

    def fail_within() -> None:
        with testing.mutant("fusion-ignores-writes-between"):
            assert checks.undisturbed is not right
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_within()
    assert checks.undisturbed is right


def test_one_mutant_at_a_time() -> None:
    """Two faults at once would say nothing about either; an unknown one is named."""
    with testing.mutant("replay-ignores-addresses"), pytest.raises(ValueError, match="on already"):
        testing.mutant("fusion-never-matches").__enter__()
    with pytest.raises(ValueError, match="did you mean 'fusion-never-matches'"):
        testing.mutant("fusion-never-match").__enter__()


def test_a_class_method_is_put_back_as_it_was() -> None:
    """A class method that a mutant replaced is a class method again afterwards."""
    from npugraph_ex.aclgraph.outputs import _ResultView

    right = _ResultView.__dict__["from_tensors"]
    with mutation.mutant("outputs-forget-offsets"):
        assert _ResultView.__dict__["from_tensors"] is not right
    assert _ResultView.__dict__["from_tensors"] is right
