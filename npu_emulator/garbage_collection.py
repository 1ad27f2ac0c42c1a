"""Python's cyclic garbage collector, told to stay out of the way while modules are imported.

Importing makes a million objects and hardly any garbage. The collector goes through all of them again and again as their
number grows, which is a sixth of the time that torch, torch_npu and the emulator take to start.
"""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["without_collector"]


@contextmanager
def without_collector() -> Iterator[None]:
    """Collect nothing inside the block; afterwards go on as before, with what the block made counted among the old objects.

    A program that switched the collector off, or froze objects of its own, finds it so.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if gc.get_freeze_count() == 0:
            # Frozen and thawed, objects land in the oldest generation without one pass over them; they stay collectable.
            gc.freeze()
            gc.unfreeze()
        gc.enable()
