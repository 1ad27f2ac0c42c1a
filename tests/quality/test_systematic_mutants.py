"""Faults made by rule: they change the running function, are gone afterwards, and the oracle says how each is noticed."""

from __future__ import annotations

import ast
import copy
import os
import signal
from collections.abc import Callable
from pathlib import Path

import coverage
import pytest
import torch

from npugraph_ex import _plurals
from npugraph_ex._plurals import counted
from npugraph_ex.fusion.rules import add_rms_norm_cast
from npugraph_ex_conformance.items import CampaignSettings, ItemAnswer, ItemKind
from npugraph_ex_conformance.mutation import oracle, table, unit_tests
from npugraph_ex_conformance.mutation import sites as sites_of
from npugraph_ex_conformance.mutation.arguments import ArguedEffect, arguments, refuted, stale
from npugraph_ex_conformance.mutation.oracle import TARGETS, MutationTarget, all_sites
from npugraph_ex_conformance.mutation.sites import by_chance, code_in, lines_of, made, running, sites, source_with


def _said() -> list[str]:
    """What the function says, or that it raises; also for whoever imported it by name."""
    assert counted is _plurals.counted
    found = []
    for number, word in ((0, "pass"), (1, "pass"), (2, "entry"), (3, "item")):
        try:
            found.append(counted(number, word))
        except Exception as error:  # noqa: BLE001 - a fault may raise anything
            found.append(type(error).__name__)
    return found


def test_a_fault_is_in_the_running_function_and_leaves_it() -> None:
    """Most faults of a small module change what its function says; each has its own effect for the length of the block."""
    right, effects = _said(), []
    for site in sites("npugraph_ex._plurals"):
        with made(site):
            effects.append(_said())
        assert _said() == right
    assert len(effects) >= 5
    assert sum(effect != right for effect in effects) >= 0.7 * len(effects)


@pytest.mark.slow
def test_functions_that_were_made_before_have_the_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule's functions are made when its module is imported; a fault in them is in those, and examples that run them look."""
    replace = add_rms_norm_cast.RULE.variants[0].replace
    every = [site for site in sites(add_rms_norm_cast.__name__) if site.text.startswith("replace(")]
    assert [site.function for site in every] == ["_direct", "_viewed"]
    monkeypatch.setattr(
        torch.ops.npu, "npu_add_rms_norm_cast", lambda *_: (torch.ones(2, 3), *[torch.zeros(1, 2, 3)] * 3)
    )
    assert replace(*"1234")[1].shape == (2, 3)
    with made(every[1]):
        assert replace(*"1234") is None
    with made(every[0]):
        assert replace(*"1234")[1].shape == (2, 3)
    first = Path(add_rms_norm_cast.__file__).read_text().splitlines()[lines_of(every[1])[0] - 1]
    assert first.strip().startswith("wide, y,")


@pytest.mark.slow
def test_the_faults_are_many_the_same_everywhere_and_in_every_part() -> None:
    """At least a thousand, each part has some, and all but a few can be made."""
    every = all_sites()
    assert len(every) == len({site for _, site in every}) >= 1000
    assert {part for part, _ in every} == set(TARGETS)
    for _, site in every[::25]:
        with made(site):
            pass


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("says", "integers/2: None"),
        ("crash", "the process dies of SIGABRT"),
        ("raises", "integers/2: raised ZeroDivisionError: x"),
        ("survives", ""),
    ],
)
def test_the_oracle_says_how_a_fault_is_noticed(monkeypatch: pytest.MonkeyPatch, change: str, said: str) -> None:
    """By the first example that runs its statement and fails, or by how the fork ended; else it survives."""

    def example(number: int) -> ItemAnswer:
        if number < 2:  # runs no line of the module; a fault would not be noticed
            return ItemAnswer()
        if counted(2, "item") == "2 items" or change == "survives":
            return ItemAnswer()
        if change == "crash":
            os.kill(os.getpid(), signal.SIGABRT)
        if change == "raises":
            raise ZeroDivisionError("x")
        return ItemAnswer("None")

    answer = _answer(monkeypatch, example)
    assert answer.value.pop("fault")[:3] == ["npugraph_ex._plurals", "counted", "early return"]
    assert answer.value == {"part": "passes", "by": said, "examples": 10}
    assert answer.message == ("survives" if change == "survives" else "")


@pytest.mark.slow
def test_a_fault_that_no_example_runs_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody calls the function; an example that is wrong without any fault looks for none."""
    answer = _answer(monkeypatch, lambda _: ItemAnswer())
    assert answer.message == "no example runs it"
    assert not answer.value["by"]
    assert not answer.value["examples"]
    answer = _answer(monkeypatch, lambda number: ItemAnswer(counted(2, "item") if number == 3 else ""))
    assert answer.value["examples"] == 0
    with pytest.raises(RuntimeError, match="12 of 12 examples fail without any fault, first integers/0: wrong"):
        _answer(monkeypatch, lambda _: ItemAnswer("wrong"))


def _answer(monkeypatch: pytest.MonkeyPatch, example: Callable[[int], ItemAnswer]) -> ItemAnswer:
    """What is said of a function that returns at once, when twelve examples look for it."""
    every = [site for site in sites("npugraph_ex._plurals") if site.function == "counted"]
    site = next(site for site in every if site.change == "early return")
    monkeypatch.setattr(oracle, "all_sites", lambda: (("passes", site),))
    monkeypatch.setattr(oracle, "_modules", lambda _: ["npugraph_ex._plurals"])
    monkeypatch.setattr(oracle, "TARGETS", {"passes": MutationTarget((), 1, (("integers", 12),))})
    kind = ItemKind("integers", "", lambda _: example)
    return oracle.systematic_mutants({kind.name: kind}.__getitem__).opened(CampaignSettings())(0)


def test_the_lines_of_a_fault_are_those_of_its_statement() -> None:
    """Of a condition its head, of an early return the first statement that runs; each is a line that Python runs."""
    every = sites("npugraph_ex._plurals")
    assert every
    for site in every:
        lines = lines_of(site)
        assert len(lines) >= 1
        if site.change == "early return":
            assert lines[0] > site.line
        else:
            assert site.line in lines


def test_a_fault_is_the_same_wherever_its_function_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines above, and other functions, change neither which faults there are nor which are chosen; each is one of a kind."""
    tree, source = sites_of.parsed("npugraph_ex._plurals")
    before = sites("npugraph_ex._plurals")
    assert len({site.identity for site in before}) == len(before) > 5
    moved = ast.increment_lineno(copy.deepcopy(tree), 7)
    monkeypatch.setattr(sites_of, "parsed", lambda _: (moved, source))
    monkeypatch.setattr(sites_of.Path, "read_bytes", lambda path: b"\n" * 7 + Path.read_text(path).encode())
    after = sites("npugraph_ex._plurals")
    assert [site.identity for site in after] == [site.identity for site in before]
    assert [site.line for site in after] == [site.line + 7 for site in before]
    assert list(map(by_chance, after)) == list(map(by_chance, before))


@pytest.mark.slow
def test_what_is_argued_of_faults_is_about_faults_that_can_be_made() -> None:
    """Code that changed takes its arguments with it; no argument is there twice, and each says why."""
    argued = arguments()
    assert stale(argued) == []
    assert all(one.why.endswith(".") and len(one.why) > 20 for one in argued.values())


def test_an_argument_about_code_that_is_gone_is_stale(tmp_path: Path) -> None:
    """As is one about another text; a wrong effect, no reason, and two arguments for one fault are refused."""
    site = sites("npugraph_ex._plurals")[0]
    entry = (
        f"[[\"{site.module}\".\"{site.function}\"]]\nchange = \"{site.change}\"\ntext = '''{site.text}'''\n"
        'effect = "none"\nwhy = "Because."\n'
    )
    file = tmp_path / "argued.toml"
    file.write_text(entry)
    assert arguments(file) == {site.identity: ArguedEffect("none", "Because.")}
    assert stale(arguments(file)) == []
    file.write_text(entry.replace(site.text, "gone"))
    assert stale(arguments(file)) == [site.identity._replace(text="gone")]
    for wrong in (entry.replace('"none"', '"some"'), entry.replace("Because.", ""), entry * 2):
        file.write_text(wrong)
        with pytest.raises(ValueError, match="an effect of none, speed, report, a reason, and once"):
            arguments(file)


def test_the_table_counts_what_is_argued_apart() -> None:
    """The score is of those of which nobody argued; an argument that an example refutes is named."""
    faults = sites("npugraph_ex._plurals")[:5]
    rows = [
        {"label": site.name, "value": {"part": "passes", "by": by, "examples": examples, "fault": [*site.identity]}}
        for site, by, examples in zip(faults, ("integers/3: x", "", "", "", ""), (2, 2, 2, 0, 2), strict=True)
    ]
    argued = {faults[1].identity: ArguedEffect("none", "One."), faults[2].identity: ArguedEffect("speed", "Two.")}
    lines = list(table.page_rows(rows, argued, {}))
    assert lines[2] == "| passes | 5 | 1 | 1 | 1 | 1 | 1 | 33% | 50% | 0 | 33% |"
    assert lines[3] == lines[2].replace("passes", "all")
    assert lines[lines.index("Survivors in passes:") + 3] == f"{faults[4].name}: {faults[4].text}"
    assert f"{faults[1].name}: {faults[1].text}\n    One." in lines[lines.index("Equivalent, as argued, in passes:") :]
    tested = {faults[3].identity: "tests/test_x.py::test_y", faults[4].identity: ""}
    with_tests = list(table.page_rows(rows, argued, tested))
    assert with_tests[2] == "| passes | 5 | 1 | 1 | 1 | 1 | 1 | 33% | 50% | 1 | 67% |"
    assert "Run by no example in passes:" in lines
    assert "Run by no example in passes:" not in with_tests
    told = with_tests.index("Noticed by unit tests alone in passes:") + 3
    assert with_tests[told] == f"{faults[3].name}: {faults[3].text}\n    tests/test_x.py::test_y"
    assert not refuted(rows, argued)
    assert refuted(rows, {faults[0].identity: ArguedEffect("none", "One.")}) == [
        f"{faults[0].name} is noticed by integers/3: x; it was argued: One."
    ]


def test_the_written_fault_is_the_one_that_is_made() -> None:
    """What stands in the file and what is put into the running program have the same effect, and the rest keeps its text."""
    before = Path(_plurals.__file__).read_text().splitlines()
    for site in sites("npugraph_ex._plurals"):
        text = source_with(site)
        written = code_in(compile(text, "x", "exec"), site.function)
        with made(site):
            assert written.co_code == running(site.module, site.function).__code__.co_code, site
        after = text.splitlines()
        assert before[:4] == after[:4]
        assert before != after


_SMALL = """
def halved(x):
    if x < 0:
        raise ValueError("negative")
    return x / 2
"""
_SMALL_TESTS = """
import pytest
import small

def test_wrong():
    assert small.halved(2) == 2

def test_number():
    assert small.halved(4) == 2

def test_negative():
    with pytest.raises(ValueError, match="negative"):
        small.halved(-1)
"""


@pytest.mark.slow
def test_unit_tests_look_for_a_written_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests that run the statement look; one that fails anyhow does not count, and the file is as before afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    file, tests = tmp_path / "small.py", tmp_path / "test_small.py"
    file.write_text(_SMALL)
    tests.write_text(_SMALL_TESTS)
    wrong, number, negative = (f"{tests}::test_{name}" for name in ("wrong", "number", "negative"))
    data = coverage.CoverageData(str(tmp_path / "map"))
    for test, lines in ((wrong, {2, 3, 5}), (number, {3, 5}), (negative, {3, 4})):
        data.set_context(f"{test}|run")
        data.add_lines({"/elsewhere/small.py": lines})
    data.set_context(f"{negative}|run")
    data.add_lines({"/elsewhere/much.py": set(range(1, 100))})  # it alone runs a line of the function, and comes first
    data.write()
    looked = unit_tests.TestsOfLines(tmp_path / "map")
    by_change = {site.change + site.text: site for site in sites("small")}
    shifted, halves = by_change["comparison shiftedx < 0"], by_change["number increasedx / 2"]
    assert looked.of(halves) == [number, wrong]
    assert looked.of(shifted) == [negative, number, wrong]
    monkeypatch.chdir(tmp_path)
    short = [f"test_small.py::test_{name}" for name in ("wrong", "number", "negative")]
    assert unit_tests.noticed(halves, short) == ("test_small.py::test_number", 2)
    assert unit_tests.noticed(shifted, short) == ("", 2)
    assert file.read_text() == _SMALL
