"""Python's cyclic garbage collection, held off for the length of a block, or made rare in it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """Let no automatic collection happen in the block; what became garbage in it goes at the next one."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


_RARELY = 20_000
"""After how many new objects that outlived others there is a collection: some programs' graphs in place of a part of one."""


@contextmanager
def rare_collection() -> Iterator[None]:
    """Let the youngest objects be collected thirty times less often in the block, in which graph after graph is made.

    Each collection goes through objects that are still in use; with Python's own threshold that is a twentieth of the time.
    """
    before = gc.get_threshold()
    if before[0]:  # 0 is never
        gc.set_threshold(max(_RARELY, before[0]), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
