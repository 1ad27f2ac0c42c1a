"""Faults made by rule: they change the running function, are gone afterwards, and the oracle says how each is noticed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from npugraph_ex import _plurals
from npugraph_ex._plurals import counted
from npugraph_ex_conformance.campaign.items import CampaignSettings, ItemAnswer
from npugraph_ex_conformance.mutation import oracle
from npugraph_ex_conformance.mutation.oracle import TARGETS, MutationTarget, all_sites
from npugraph_ex_conformance.mutation.sites import lines_of, made, sites


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
    assert answer.value == {"part": "passes", "by": said, "examples": 10}
    assert answer.message == ("survives" if change == "survives" else "")


def test_a_fault_that_no_example_runs_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody calls the function; an example that is wrong without any fault looks for none."""
    answer = _answer(monkeypatch, lambda _: ItemAnswer())
    assert answer.message == "no example runs it"
    assert answer.value == {"part": "passes", "by": "", "examples": 0}
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
    monkeypatch.setattr(oracle, "_opened_kind", lambda *_: example)
    return oracle.SYSTEMATIC.opened(CampaignSettings())(0)


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
