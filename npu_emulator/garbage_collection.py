"""Switches Python's cyclic garbage collector off during imports.

Imports make a million objects and hardly any garbage. The collector would visit all of them again and again, which takes a
sixth of the start of torch, torch_npu and the emulator.
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
    """Collect nothing inside the block. Afterwards the new objects count among the old ones.

    The collector's switch and the program's own frozen objects do not change.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if gc.get_freeze_count() == 0:
            # Freeze and unfreeze put objects into the oldest generation without a pass over them; they stay collectable.
            gc.freeze()
            gc.unfreeze()
        gc.enable()
