"""Keeps the import of torch_npu out of the working folder.

It looks for CANN's version in every folder below ASCEND_HOME_PATH, and without CANN that is the working folder: an import took
seconds beside an environment, and as long as the disk needs beside a million files.
"""

from __future__ import annotations

import os
import sys
from typing import Any

__all__ = ["leave_unsearched"]

_SEARCHING = "torch_npu.utils.collect_env"


def leave_unsearched() -> None:
    """Let the coming import of torch_npu find nothing there. Every other `os.walk` is as always."""
    told = getattr(os.walk, "__module__", "") == __name__
    if told or _SEARCHING in sys.modules or "ASCEND_HOME_PATH" in os.environ:
        return
    walk = os.walk

    def walk_elsewhere(top: Any, *args: Any, **kwargs: Any) -> Any:
        if sys._getframe(1).f_globals.get("__name__") != _SEARCHING:  # noqa: SLF001 - who asks, which nothing else tells
            return walk(top, *args, **kwargs)
        os.walk = walk
        return iter(())

    os.walk = walk_elsewhere
