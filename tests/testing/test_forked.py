"""Forks that answer: values come back in order, and a fork that fails or is killed answers nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def test_what_forks_return_comes_back(ask: Callable[..., Any]) -> None:
    """Of each, also where it is longer than a pipe holds; the next ones do not suffer from one that fails."""
    code = """
import os, signal
from npugraph_ex_conformance.forked import forked
def fails():
    raise ValueError("said on stderr")
answer = forked(lambda: [1, 2], fails, lambda: os.kill(os.getpid(), signal.SIGKILL), lambda: 300000 * "x")
"""
    first, *none, last = ask(code)
    assert first == [1, 2]
    assert none == [None, None]
    assert last == 300000 * "x"
