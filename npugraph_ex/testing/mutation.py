"""Deliberate faults: named small patches, one switched on at a time, to prove that the suite would notice.

A mutant costs nothing when it is off: no code of the library knows of it. The mutants are the suite's, which stands above: a test
of a client names one and knows no suite, and the script of a failure names the one that was on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from typing import Any

from npugraph_ex.testing.arguments import checked


@dataclass(frozen=True)
class Mutant:
    """A fault.

    Attributes:
        name: what ``mutant(name)`` and ``--mutant`` call it.
        breaks: the promise that it breaks, in a sentence.
        target: "module:attribute" of what is replaced; the attribute may be dotted (a method).
        replacement: makes the broken thing from the right one. Called when the mutant is switched on.
        found_by: the family of examples that finds it, a name in the suite's `examples.FAMILIES`.
    """

    name: str
    breaks: str
    target: str
    replacement: Callable[[Any], Any]
    found_by: str


_active: list[str] = []


def mutants() -> dict[str, Mutant]:
    """Every mutant of the suite, by name."""
    from npugraph_ex_conformance.mutants import MUTANTS

    return {mutant.name: mutant for mutant in MUTANTS}


def active_mutant() -> str | None:
    """The name of the mutant that is on."""
    return _active[-1] if _active else None


def no_such_mutant(name: str) -> str:
    """What is said of a name that is no mutant's: the nearest right one, and what lists them all."""
    near = get_close_matches(name, mutants(), n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"there is no mutant called {name!r}; {hint}`npugraph-ex conformance --mutant list` lists all"


@checked
def mutant(name: str) -> AbstractContextManager[Mutant]:
    """Switch a mutant on within a ``with`` block.

    Raises:
        ValueError: there is no such mutant; or one is on already, since the effect of two says nothing about either.
    """
    known = mutants()
    if name not in known:
        raise ValueError(f"{no_such_mutant(name)}.")
    return _switched_on(known[name])


@contextmanager
def _switched_on(chosen: Mutant) -> Iterator[Mutant]:
    if _active:
        raise ValueError(f"mutant {_active[-1]!r} is on already; switch it off before switching on {chosen.name!r}.")
    module, _, path = chosen.target.partition(":")
    *owners, attribute = path.split(".")
    owner: Any = import_module(module)
    for part in owners:
        owner = getattr(owner, part)
    before = vars(owner)[attribute]  # not getattr, which binds a class method
    setattr(owner, attribute, chosen.replacement(getattr(owner, attribute)))
    _active.append(chosen.name)
    try:
        yield chosen
    finally:
        _active.pop()
        setattr(owner, attribute, before)
