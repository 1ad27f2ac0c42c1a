"""Keeps the warnings of torch's kernels away: they are about inputs that the validation chose. Other warnings are shown once.

Operators that are called as ``torch.ops`` print each warning on stderr, past Python's filters. While one of torch's own
functions runs, it keeps those of all that it calls, and warns through Python at its end.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def with_warnings_once(function: Callable[[], T]) -> T:
    """The result of ``function``, or what it raises; then its warnings but a kernel's, of those with one text the first."""
    results: list[T] = []

    def call(value: float) -> float:
        results.append(function())
        return value

    with warnings.catch_warnings(record=True) as caught:
        try:
            torch.zeros(1).apply_(call)  # any function of torch that calls back would do
        finally:
            found = {str(one.message): one for one in reversed(caught)}
    for one in reversed(found.values()):
        if "(Triggered internally at " not in str(one.message):  # as torch ends a warning of its C++ code
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
    return results[0]
