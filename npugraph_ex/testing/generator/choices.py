"""Where a program's random choices come from: hypothesis, which can shrink them, or a plain generator, which is fast."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, Protocol, TypeVar

from hypothesis import strategies as st

T = TypeVar("T")


class Source(Protocol):
    """Answers one question: a number below another."""

    def below(self, count: int) -> int:
        """One of 0 ... count - 1; 0 is the simplest."""


class Sampled:
    """Choices of a seeded generator: the same seed gives the same program on every machine.

    Args:
        seed: anything that prints alike wherever it means the same.
    """

    def __init__(self, seed: object) -> None:
        self._random = random.Random(str(seed))  # noqa: S311 - nothing here is secret

    def below(self, count: int) -> int:
        """As in ``Source``."""
        tape = _tape.get()
        return tape.next(count, self._random) if tape is not None else int(self._random.random() * count)


class Tape:
    """The numbers that seeded generators answer in place of their own, and all that they answered.

    An example as a list of numbers can be changed, and be made again from the list.

    Args:
        given: the first answers; of one that is too large, what is left when divided by how many there are; None for a new one.
        chance: makes new answers, also after those given; by default the generator that is asked makes its own.
    """

    def __init__(self, given: Iterable[int | None] = (), chance: random.Random | None = None) -> None:
        self._given, self._chance = iter(given), chance
        self.answered: list[int] = []

    def next(self, count: int, generator: random.Random) -> int:
        """The answer to ``Source.below``."""
        given = next(self._given, None)
        new = (self._chance or generator).random()  # also where an answer is given, so that the next new one is another
        self.answered.append(int(new * count) if given is None else given % count)
        return self.answered[-1]

    @contextmanager
    def on(self) -> Iterator[None]:
        """Whatever samples in the block uses the tape."""
        token = _tape.set(self)
        try:
            yield
        finally:
            _tape.reset(token)


_tape: ContextVar[Tape | None] = ContextVar("_tape", default=None)


class Drawn:
    """Choices of hypothesis, inside a composite strategy.

    Args:
        draw: what ``st.composite`` gives.
    """

    def __init__(self, draw: Callable[[st.SearchStrategy[Any]], Any]) -> None:
        self._draw = draw

    def below(self, count: int) -> int:
        """As in ``Source``."""
        return int(self._draw(_numbers(count))) if count > 1 else 0


@cache
def _numbers(count: int) -> st.SearchStrategy[int]:
    """One strategy a range: making a strategy costs more than drawing from it."""
    return st.integers(0, count - 1)


class Choices:
    """Random choices of every kind that a program needs.

    Args:
        source: where the numbers come from.
    """

    def __init__(self, source: Source) -> None:
        self._source = source

    def chance(self, percent: int) -> bool:
        """True with about this probability; shrinks to False."""
        return self._source.below(100) >= 100 - percent

    def pick(self, options: Sequence[T]) -> T:
        """One of the options; shrinks to the first."""
        return options[self._source.below(len(options))]

    def number(self, low: int, high: int) -> int:
        """A number from ``low`` to ``high``, both included; shrinks to ``low``."""
        return low + self._source.below(high - low + 1)

    def order(self, values: Sequence[T]) -> list[T]:
        """The values in some order; shrinks to the one given."""
        left = list(values)
        return [left.pop(self._source.below(len(left))) for _ in values]
