"""Ctrl-C at a chosen point: what the examples send themselves, no handler of the program around them sees."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from npugraph_ex._plurals import counted
from npugraph_ex_conformance.examples.interrupts import interrupted


@pytest.fixture
def _sigint_as_before() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_swallowed_interrupt_is_lost() -> None:
    """An example that sends Ctrl-C and never gets it says so."""

    def swallows() -> None:
        with suppress(KeyboardInterrupt):
            counted(2, "item")

    assert interrupted(swallows, 1)


@pytest.mark.usefixtures("_sigint_as_before")
@pytest.mark.parametrize("ignored", [False, True])
def test_the_program_around_an_example_sees_no_signal(*, ignored: bool) -> None:
    """The call is stopped, whatever the program does with SIGINT, and the program's handler is there again."""
    seen: list[int] = []

    def of_the_program(number: int, frame: object) -> None:
        del frame
        seen.append(number)

    handler: Any = signal.SIG_IGN if ignored else of_the_program
    signal.signal(signal.SIGINT, handler)
    said: list[str] = []
    for at in (1, 1000):
        assert not interrupted(lambda: said.append(counted(2, "item")), at)
    assert len(said) == 1
    assert signal.getsignal(signal.SIGINT) == handler
    assert seen == []
