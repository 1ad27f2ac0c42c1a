"""Asks both backends the same question, each in a process of its own, once a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

OURS, BUNDLED = "npugraph_ex", "bundled"
_CHOICES = {OURS: "library", BUNDLED: "bundled"}
Answers = dict[str, list[dict[str, float]]]


def ask_ours(question: str, *arguments: str) -> list[dict[str, float]]:
    """This library's answers of `subject.py` to a question that the bundled backend is not asked."""
    return ask(question, *arguments, backends=(OURS,))[OURS]


@cache
def ask(question: str, *arguments: str, backends: tuple[str, ...] = (OURS, BUNDLED)) -> Answers:
    """The answers of `subject.py` to a question, by backend, one for each argument (JSON)."""
    answers: Answers = {}
    for backend in backends:
        done = subprocess.run(
            [sys.executable, str(Path(__file__).with_name("subject.py")), question, *arguments],
            env={**os.environ, "NPUGRAPH_EX": _CHOICES[backend]},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{backend} could not answer {question} {arguments}:\n{done.stderr[-4000:]}")
        answers[backend] = json.loads(done.stdout.splitlines()[-1])
    return answers
