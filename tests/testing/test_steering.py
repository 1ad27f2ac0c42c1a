"""Steered examples: numbers make an example again, conditions are counted, rare code is reached more often, failures shrink."""

from __future__ import annotations

import random
from collections.abc import Hashable

import pytest

from npugraph_ex import _plurals
from npugraph_ex.testing import exact_programs, mutant, sample
from npugraph_ex.testing.generator.choices import Choices, Sampled, Tape
from npugraph_ex.testing.generator.client_operators import client_operators
from npugraph_ex_conformance.campaign.kinds import KINDS, kind_named
from npugraph_ex_conformance.items import CampaignSettings, ItemAnswer
from npugraph_ex_conformance.steering.kind import again
from npugraph_ex_conformance.steering.points import Points
from npugraph_ex_conformance.steering.search import SteeredExample, Steering


def test_the_numbers_of_an_example_make_it_again() -> None:
    """With another seed, too; where the numbers end, those of the seed go on, and one that is too large is divided."""
    maker, tape = exact_programs(), Tape()
    with tape.on():
        program = sample(maker, 1)
    assert program == sample(maker, 1)
    again = Tape(tape.answered)
    with again.on():
        assert sample(maker, 2) == program
    assert again.answered == tape.answered
    blind = Choices(Sampled(3))
    drawn = [blind.number(0, 4), blind.number(0, 9)]
    with Tape([7, None]).on():
        choices = Choices(Sampled(3))
        assert [choices.number(0, 4), choices.number(0, 9)] == [2, drawn[1]]


def test_each_way_of_a_condition_is_counted() -> None:
    """A function says what it said, and its conditions count until the block ends."""
    points = Points(["npugraph_ex._plurals"])
    with points.counting():
        assert _plurals.counted(1, "item") == "1 item"
        one = points.taken()
        assert _plurals.counted(2, "item") == "2 items"
        assert [] != one != points.taken() != []
        assert not points.taken()
        _plurals.counted(1, "item")
        assert points.taken() == one
        for _ in range(5):
            _plurals.counted(1, "item")
        assert points.taken() != one
        points.taken()
    _plurals.counted(1, "item")
    assert not points.taken()


def test_what_few_examples_reach_is_reached_again() -> None:
    """A condition of three choices that holds for one blind example in 512 is met ten times as often."""

    def check(number: int) -> ItemAnswer:
        choices, found = Choices(Sampled(number)), list[int]()
        for _ in range(3):
            found.append(choices.number(0, 7))
            if found[-1]:
                break
        return ItemAnswer(features=[str(len(found)), *(["met"] if found == [0, 0, 0] else [])])

    def reached(answer: ItemAnswer) -> list[Hashable]:
        return [*answer.features]

    steering = Steering(check, reached, random.Random(0))
    for _ in steering.examples(2048):
        pass
    assert steering.counts["met"] > 40


@pytest.mark.slow
def test_a_failed_search_names_its_example_and_shrinks_it() -> None:
    """The item says which example failed; the example is made again by what it says, and is right without the fault."""
    settings, check = CampaignSettings(), KINDS["steered"].opened(CampaignSettings())
    with client_operators():
        with mutant("noop-removal-ignores-writes"):
            answer = next(answer for answer in map(check, range(4)) if answer.message)
            said, script = again(settings, answer.label, kind_named)
            assert said == answer.message
        assert "mutant='noop-removal-ignores-writes'" in script
        assert again(settings, answer.label, kind_named) == ("", "")
    assert answer.label.startswith("integers/")


def test_an_example_reads_as_it_prints() -> None:
    """With numbers and without."""
    for example in (SteeredExample(12, (0, 7, 99)), SteeredExample(3, ())):
        assert SteeredExample.read(str(example)) == example
