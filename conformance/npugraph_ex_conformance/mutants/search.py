"""Kills mutants: with each fault switched on, examples of its family are checked until one fails."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from npugraph_ex.testing import mutation
from npugraph_ex.testing.arguments import check_least, checked
from npugraph_ex_conformance.examples import FAMILIES

BUDGET = 250
"""How many examples a mutant may survive; the suite must kill every mutant within it."""


@dataclass(frozen=True)
class Kill:
    """What came of one mutant.

    Attributes:
        mutant: its name.
        breaks: the promise that it breaks.
        family: of the examples.
        examples: how many it took; None when it survived them all.
        seconds: of processor time.
        message: what the last example said.
    """

    mutant: str
    breaks: str
    family: str
    examples: int | None
    seconds: float
    message: str = ""


@checked
def kill(name: str, *, budget: int = BUDGET, first: int = 1) -> Kill:
    """Look for an example that fails with the mutant ``name`` switched on.

    Args:
        name: of a mutant.
        budget: how many examples to try.
        first: the example to begin with, such as one that has failed before.

    Raises:
        ValueError: there is no such mutant, or the budget or ``first`` is below one.
    """
    check_least("budget", budget, 1)
    check_least("first", first, 1)
    with mutation.mutant(name) as mutant, _quiet():
        example, start = FAMILIES[mutant.found_by], time.process_time()
        for seed in dict.fromkeys((first - 1, *range(budget))):
            message = example(seed)
            if message:
                seconds = time.process_time() - start
                return Kill(name, mutant.breaks, mutant.found_by, seed + 1, seconds, message)
    return Kill(name, mutant.breaks, mutant.found_by, None, time.process_time() - start)


def kill_all(
    names: Sequence[str] | None = None, *, budget: int = BUDGET, on_kill: Callable[[Kill], None] | None = None
) -> list[Kill]:
    """Kill the named mutants, or all; ``on_kill`` is told of each as it is done."""
    done = []
    for name in names if names is not None else mutation.mutants():
        done.append(kill(name, budget=budget))
        if on_kill is not None:
            on_kill(done[-1])
    return done


def false_kills(kills: Sequence[Kill], *, on_example: Callable[[int, int], None] = lambda *_: None) -> Iterator[str]:
    """Examples that fail without any mutant: those that killed one, checked again without it.

    ``on_example`` is called after each with how many are done, and of how many.
    """
    with _quiet():
        again = sorted({(done.family, done.examples - 1) for done in kills if done.examples})
        for count, (family, seed) in enumerate(again, 1):
            message = FAMILIES[family](seed)
            on_example(count, len(again))
            if message:
                yield f"{family}, example {seed}: {message}"


@contextmanager
def _quiet() -> Iterator[None]:
    """A fault makes the library complain at length."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)
