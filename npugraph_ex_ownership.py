"""Tells whether only this user can have written what lies in a file or a folder, which is asked before it is run.

The library asks it of saved compilations, the emulator of its compiled runtime. Neither package imports the other, so the
check stands beside both. It imports the standard library only. PYTEST_DONT_REWRITE: no test lies here.
"""

from __future__ import annotations

import os
import stat

_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def distrust(path: str | os.PathLike[str], status: os.stat_result) -> str | None:
    """Say in half a sentence why others may have written what lies at a path, and what to do; None if they cannot.

    Args:
        path: names the file or folder in the answer.
        status: its status; of the open file, where it is opened, whatever has the name by then.
    """
    if status.st_uid != os.geteuid():
        return f"{os.fspath(path)} belongs to user {status.st_uid}, and this is user {os.geteuid()}: use a folder of your own"
    if status.st_mode & _OTHERS:
        return f"{os.fspath(path)} can be written by others: use one that only you can write (`chmod go-w` your own)"
    return None
