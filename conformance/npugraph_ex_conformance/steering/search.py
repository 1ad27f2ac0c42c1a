"""Examples as lists of numbers: one that reached what few reach is changed into the next one."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from npugraph_ex.testing.generator.choices import Tape
from npugraph_ex_conformance.items import ItemAnswer

CHANGED = 50
"""The chance in percent that an example is a changed one; the others are drawn blindly, and find what is new."""
_FEW = 4
"""So many examples are kept of those that reached the same."""
_DRAWN, _RARE = 64, 8
"""Of so many things by chance, so many are rare: the fewest examples reached them."""
_REDRAWN = (1, 2, 4, 8)


class SteeredExample(NamedTuple):
    """An example of a campaign's kind, with the numbers that its generator answered.

    Attributes:
        number: of the example; it decides what is no random choice, such as the order of the device.
        answers: to ``Source.below``, in their order.
    """

    number: int
    answers: tuple[int, ...]

    @classmethod
    def read(cls, text: str) -> SteeredExample:
        """The example that prints so."""
        number, _, answers = text.partition(":")
        return cls(int(number), tuple(map(int, answers.split(".") if answers else ())))

    def __str__(self) -> str:
        return f"{self.number}:{'.'.join(map(str, self.answers))}"

    def tape(self) -> Tape:
        """A tape of these answers."""
        return Tape(self.answers)


def changed(answers: Sequence[int], others: Sequence[Sequence[int]], chance: random.Random) -> list[int | None]:
    """The answers of an example with a new rest, the rest of another example, or some new numbers."""
    found: list[int | None] = list(answers)
    at = chance.randrange(len(found) + 1)
    match chance.randrange(3):
        case 0:
            return found[:at]
        case 1:
            return [*found[:at], *chance.choice(others)[at:]]
    for _ in range(min(chance.choice(_REDRAWN), len(found))):
        found[chance.randrange(len(found))] = None
    return found


@dataclass
class Steering:
    """A search that is steered: the same seed gives the same examples where the same is reached.

    Attributes:
        check: example ``number``, whose choices the search makes.
        reached: what the last example reached, each thing once; the order is a part of the search.
        chance: of the search.
        share: of the examples that are changed ones, in percent.
        counts: how many examples reached each thing.
        kept: the first that did.
    """

    check: Callable[[int], ItemAnswer]
    reached: Callable[[ItemAnswer], Sequence[Hashable]]
    chance: random.Random
    share: int = CHANGED
    counts: dict[Hashable, int] = field(default_factory=dict)
    kept: dict[Hashable, list[SteeredExample]] = field(default_factory=dict)

    def examples(self, count: int, *, first: int = 0) -> Iterator[tuple[SteeredExample, ItemAnswer]]:
        """Check so many examples; the numbers of those drawn blindly begin at ``first``."""
        for number in range(first, first + count):
            example, tape = self._next(number)
            with tape.on():
                answer = self.check(example)
            done = SteeredExample(example, tuple(tape.answered))
            for thing in self.reached(answer):
                self.counts[thing] = self.counts.get(thing, 0) + 1
                if self.counts[thing] <= _FEW:
                    self.kept.setdefault(thing, []).append(done)
            yield done, answer

    def _next(self, number: int) -> tuple[int, Tape]:
        """The example of a number, or a change of one that reached something rare."""
        if not self.kept or self.chance.randrange(100) >= self.share:
            return number, Tape()
        things = self.chance.choices([*self.kept], k=_DRAWN)
        own = self.kept[self.chance.choice(sorted(things, key=self.counts.__getitem__)[:_RARE])]
        chosen = self.chance.choice(own)
        answers = changed(chosen.answers, [example.answers for example in own], self.chance)
        return chosen.number, Tape(answers, self.chance)
