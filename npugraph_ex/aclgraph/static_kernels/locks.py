"""Locks between processes, on files. The system frees a lock when its process ends, in whatever way.

Why not filelock, which torch installs? In its releases up to 3 at least, a forked child that drops the lock object also frees
the lock of its parent, so a lease would end while its process lives. torch requires no later release, and this package would
become only 20 lines shorter.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from npugraph_ex.errors import StaticKernelError

_LOOK_AGAIN = 0.05  # seconds


def open_for_lock(path: Path) -> int:
    """A descriptor for `try_lock`. Closing it releases the lock. Child programs do not inherit it."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def try_lock(descriptor: int) -> bool:
    """Take the lock if no other process has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def locked(path: Path, limit: float) -> Iterator[None]:
    """Take a lock for a block.

    Raises:
        StaticKernelError: another process held it for ``limit`` seconds.
    """
    descriptor, until = open_for_lock(path), time.monotonic() + limit
    try:
        while not try_lock(descriptor):
            if time.monotonic() > until:
                raise StaticKernelError(f"another process has held {path} for {limit:g} seconds")
            time.sleep(_LOOK_AGAIN)
        yield
    finally:
        os.close(descriptor)
