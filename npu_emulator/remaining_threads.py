"""The threads that a program leaves behind: Python waits for them before it ends, and so does a command that then tells of them."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import Executor


def wait_for_remaining_threads() -> None:
    """Wait, as Python does at its end, until executors have done what they were given and the threads that are no daemons end.

    The workers of an executor wait for more work until it is shut down; Python then does that, too.
    """
    for one in gc.get_objects():
        if issubclass(type(one), Executor):
            one.shutdown()
    while left := remaining_threads():
        left[0].join()


def remaining_threads() -> list[threading.Thread]:
    """The threads beside the main one that keep the process alive."""
    return [one for one in threading.enumerate() if not one.daemon and one is not threading.main_thread()]
