"""The grad mode and its like that guards compare: torch 2.10 keeps those of the last compilation for the next precompilation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from npugraph_ex.versions.difference import VersionDifference

DIFFERENCE = VersionDifference(
    what="Torch 2.11 forgets a compilation's global state at its end; before, a precompilation compares it in its guards.",
    since=(2, 11),
    test="tests/cache/test_cache_compile.py",
)


@contextmanager
def no_earlier_state() -> Iterator[None]:
    """Let a precompilation see no global state of an earlier compilation."""
    from torch._dynamo import convert_frame

    before = convert_frame.initial_global_state
    if DIFFERENCE.older:
        convert_frame.initial_global_state = None
    try:
        yield
    finally:
        convert_frame.initial_global_state = before
