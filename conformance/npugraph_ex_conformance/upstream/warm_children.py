"""Processes that a test starts by spawning come from a server that has imported torch and torch_npu, in a tenth of the time.

A spawned process begins with nothing; one of the server begins with the imports that each of these tests makes first, and with
the variables of the process that starts it. The server itself never starts a device.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
from multiprocessing import context
from typing import Any

import torch.multiprocessing

__all__ = ["serve"]

_PRELOADED = (
    "numpy",
    "torch.multiprocessing",
    "torch.testing._internal.common_distributed",
    "torch_npu.testing.testcase",
)


class _ServedProcess(context.ForkServerProcess):
    """A process of the server, with the starter's variables."""

    _start_method = "spawn"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._variables: dict[str, str] = {}

    def start(self) -> None:
        """Take the variables as they are now, as a spawned process would."""
        self._variables = dict(os.environ)
        super().start()

    def run(self) -> None:
        """Run the target with these variables.

        A tensor in a queue outlives its process: a spawned one takes long to end, and some tests rely on that.
        """
        os.environ.clear()
        os.environ.update(self._variables)
        torch.multiprocessing.set_sharing_strategy("file_system")
        super().run()

    def _bootstrap(self, *args: Any, **kwargs: Any) -> int:
        """Also run what is registered for the end, as a spawned process does."""
        status: int = super()._bootstrap(*args, **kwargs)  # type: ignore[misc]
        atexit._run_exitfuncs()
        return status


class _ServedContext(context.ForkServerContext):
    """What `get_context("spawn")` gives."""

    _name = "spawn"
    Process = _ServedProcess


def serve() -> None:
    """Let this process spawn from a server, which starts with the first process."""
    multiprocessing.set_forkserver_preload(list(_PRELOADED))
    context._concrete_contexts["spawn"] = _ServedContext()  # type: ignore[attr-defined]
