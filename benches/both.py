"""Asks both backends the same question, each in a process of its own, once a run."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

OURS, BUNDLED = "npugraph_ex", "bundled"
_CHOICES = {OURS: "library", BUNDLED: "bundled"}
_TAIL = 4000
"""So many characters of what a process wrote last are shown if it fails."""
Answers = dict[str, list[dict[str, float]]]


def ask_ours(question: str, *arguments: str) -> list[dict[str, float]]:
    """This library's answers of `subject.py` to a question that the bundled backend is not asked."""
    return ask(question, *arguments, backends=(OURS,))[OURS]


def ask(question: str, *arguments: str, backends: tuple[str, ...] = (OURS, BUNDLED)) -> Answers:
    """The answers of `subject.py` to a question, by backend, one for each argument (JSON).

    Args:
        question: a function of `subject.py`, or several joined by "+", whose answers come as one.
        arguments: as JSON; a list is several arguments of one answer.
        backends: which are asked, one after the other.

    Raises:
        RuntimeError: the process ended before it had answered; with how it ended and what it wrote last.
    """
    answers = {backend: _answer(backend, question, arguments) for backend in backends}
    for answer in answers.values():
        if isinstance(answer, RuntimeError):
            raise answer
    return answers  # type: ignore[return-value]  # no errors are among them


@contextlib.contextmanager
def asked_ahead(*questions: tuple[str, tuple[str, ...], str]) -> Iterator[None]:
    """Ask several questions two at a time, for answers that are counts: a process beside it would lengthen times.

    `ask` waits for its own question alone, so what comes first is in the tables while others are asked. At the end of the block
    those that nobody has asked for are dropped. Each process has one thread of OpenMP: several would wait for one another where the
    cores are taken, and the wait counts as time of the process.

    Args:
        questions: question, arguments and backend, as `ask` will be asked for them in the block.
    """
    workers = ThreadPoolExecutor(max_workers=2)
    begun = {
        (backend, *rest): workers.submit(_asked, backend, *rest, OMP_NUM_THREADS="1") for *rest, backend in questions
    }
    _BEGUN.update(begun)
    try:
        yield
    finally:
        workers.shutdown(cancel_futures=True)
        for key in begun:
            del _BEGUN[key]


_BEGUN: dict[tuple[Any, ...], Future[list[dict[str, float]] | RuntimeError]] = {}


def _answer(*key: Any) -> list[dict[str, float]] | RuntimeError:
    return _BEGUN[key].result() if key in _BEGUN else _asked(*key)


@cache
def _asked(
    backend: str, question: str, arguments: tuple[str, ...], **variables: str
) -> list[dict[str, float]] | RuntimeError:
    """The answers of one process with these variables of the environment, or its failure, which is not tried again either."""
    command = [sys.executable, str(Path(__file__).with_name("subject.py")), question, *arguments]
    try:
        name = f"{backend}, asked for {question} {' '.join(arguments)},"
        return answers_of(command, name=name, NPUGRAPH_EX=_CHOICES[backend], **variables)
    except RuntimeError as error:
        return error


def answers_of(command: list[str], *, name: str, **variables: str) -> list[dict[str, float]]:
    """What a process prints as its last line, which is JSON.

    Args:
        command: the process.
        name: what the error calls it.
        variables: of the environment, besides this process's own.

    Raises:
        RuntimeError: it ended before it had answered; with how it ended and what it wrote last.
    """
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, check=False)
    answers = None
    with contextlib.suppress(ValueError):
        answers = json.loads((done.stdout.splitlines() or [""])[-1])
    if done.returncode or not isinstance(answers, list):
        wrote = (done.stdout + done.stderr)[-_TAIL:].strip() or "(nothing)"
        raise RuntimeError(f"{name} gave no answer: {_ending(done.returncode)}. It wrote last:\n{wrote}")
    return answers


def _ending(status: int) -> str:
    """How a process ended, in words."""
    if status == 0:
        return "it ended well, but its last line is no JSON"
    if status > 0:
        return f"it ended with status {status}"
    number = -status
    cause = ", as the system does where memory runs out" if number == signal.SIGKILL else ""
    return f"it was ended by {signal.Signals(number).name}{cause}"
