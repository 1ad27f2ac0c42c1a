"""Room for the frames of the functions that a compilation calls.

CPython 3.11 and 3.12 keep the frames of Python functions in pieces of 16 KiB, and give a piece back as soon as its first frame is
left. Where a piece ends in front of a loop, each call of that loop maps memory and unmaps it again, which takes many times as long
as the call: https://github.com/python/cpython/issues/142183, mended in 3.14. A compilation is deep and meets many such ends.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_SLOTS = 1 << 16
"""Of the frame: 512 KiB that nothing touches. CPython rounds the piece for it up to 1 MiB, and the frames above lie in the rest."""

P = ParamSpec("P")
R = TypeVar("R")


def roomy(function: Callable[P, R]) -> Callable[P, R]:
    """The function, called from a frame that is larger than a piece: then it has a larger piece, and so have all that it calls."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return function(*args, **kwargs)

    call.__code__ = call.__code__.replace(co_stacksize=_SLOTS)  # type: ignore[attr-defined]  # mypy knows no code of a wrapper
    return call
