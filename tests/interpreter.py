"""The Python that tests start: as the installed command, it does not import from the current folder."""

from __future__ import annotations

import sys

__all__ = ["PYTHON", "QUICK"]

PYTHON = (sys.executable, "-P") if sys.version_info >= (3, 11) else (sys.executable,)
"""Python 3.10 has no such switch: there `QUICK` does it."""

_NO_FOLDER = "" if sys.version_info >= (3, 11) else "import sys; sys.path.remove('');"

# Half the time of a short process is the garbage collector's: its passes while torch is imported, and its search at the end.
QUICK = f"{_NO_FOLDER}import atexit, gc; gc.set_threshold(50_000, 10, 100); atexit.register(gc.freeze)"
"""The first line of a program for `-c`."""
