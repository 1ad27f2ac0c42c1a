"""Calls at every depth map no memory, where the first of them has room."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from npugraph_ex.versions.frame_room import roomy

_DEPTHS = 400  # several pieces of 16 KiB
_CALLS = 100


def _leaf(a: int, b: int, c: int) -> int:
    d, e, f = a, b, c
    return d + e + f


def _most_faults(depth: int) -> int:
    """The most page faults of a loop of calls, of all depths down to this one: whoever maps memory for a call touches it."""
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for _ in range(_CALLS):
        _leaf(1, 2, 3)
    here = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
    return max(here, _most_faults(depth - 1)) if depth else here


@pytest.mark.parametrize("calls", [_most_faults, roomy(_most_faults)])
def test_no_depth_maps_memory_at_each_call(calls: Callable[[int], int]) -> None:
    """Without room there is a depth that does, until Python 3.13: what the module is for."""
    with ThreadPoolExecutor(1) as thread:  # whose frames begin in a piece of their own
        faults = thread.submit(calls, _DEPTHS).result()
    if calls is not _most_faults:
        assert faults < _CALLS / 2
    elif sys.version_info < (3, 13):
        assert faults >= _CALLS


def test_a_call_is_the_same() -> None:
    """Arguments, result and name; an error is the function's own."""

    @roomy
    def quotient(left: int, *, right: int) -> float:
        """Of two numbers."""
        return left / right

    assert quotient(3, right=2) == 1.5
    assert (quotient.__name__, quotient.__doc__) == ("quotient", "Of two numbers.")
    with pytest.raises(ZeroDivisionError):
        quotient(1, right=0)
