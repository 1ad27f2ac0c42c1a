"""A process on one emulated chip that has imported what every test file imports, and forks one process for each file.

To import torch, torch_npu and their testing helpers takes longer than most files take. `Nursery` is the caller's side;
`main` is the process, started as ``python -m npu_emulator --soc CHIP -m npugraph_ex_conformance.upstream.nursery``. It takes one
order a line, a JSON object (`worker` lists its fields), and answers with two lines: the number of the forked process, and
how that process ended, as ``os.waitpid`` gives it.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

_SHARED = ("pytest", "numpy", "expecttest", "torch.testing._internal.common_utils", "torch_npu.testing.testcase",
           "torch_npu.testing.common_utils")  # fmt: skip
"""What test files import; those that are not installed are left out."""
_FOLDERS_OF_CANN = ("compiler", "opp", "runtime")
"""Without one of them torch_npu refuses to start, or prints into the output of each process that CANN is missing."""


class Nursery:
    """The caller's side: one forked process at a time."""

    def __init__(self, chip: str, environment: Mapping[str, str]) -> None:
        """Start the process, with the variables of an installed CANN, and empty folders where it would be."""
        self._cann = tempfile.TemporaryDirectory()
        home = Path(self._cann.name)
        for folder in _FOLDERS_OF_CANN:
            (home / folder).mkdir()
        environment = {**environment, "ASCEND_HOME_PATH": str(home), "ASCEND_OPP_PATH": str(home / "opp")}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "npu_emulator", "--quiet", "--soc", chip, "-m", __name__],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def start(self, order: Mapping[str, Any]) -> int:
        """Fork a process for an order; return its number.

        Raises:
            RuntimeError: the process itself ended; the message has what it said.
        """
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()
        return self._answer()

    def ended(self, seconds: float) -> int | None:
        """How the forked process ended, as ``os.waitstatus_to_exitcode`` gives it; None if it has not within so long."""
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], seconds)
        return os.waitstatus_to_exitcode(self._answer()) if ready else None

    def _answer(self) -> int:
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        line = self._process.stdout.readline()
        if not line:
            said = self._process.stderr.read().decode(errors="replace").strip()
            raise RuntimeError(f"the process on the emulated device ended: {said[-2000:]}")
        return int(line)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        self._cann.cleanup()


def main() -> None:
    """Import, then fork for each order until there are no more."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # a terminal sends it to everyone; the caller ends this process and its child
    for name in _SHARED:
        with suppress(ImportError):
            importlib.import_module(name)
    orders, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    for line in orders:
        child = os.fork()
        if child == 0:
            _run(json.loads(line))
        answers.write(f"{child}\n")
        answers.flush()
        answers.write(f"{os.waitpid(child, 0)[1]}\n")
        answers.flush()


def _run(order: dict[str, Any]) -> NoReturn:
    """Become the process of one test file."""
    status = 3
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        output = os.open(order["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(order["place"])
        import pytest

        from npugraph_ex_conformance.upstream import warm_children
        from npugraph_ex_conformance.upstream.worker import Worker

        warm_children.serve()
        # `python FILE` has the file's folder first; pytest leaves it out where that is a package.
        sys.path[:0] = [str(Path(order["file"]).parent), order["tests"]]
        sys.argv = [order["file"]]
        own = [order["file"], "-q", "-p", "no:cacheprovider", "-c", os.devnull, f"--rootdir={order['tests']}"]
        status = int(pytest.main(own, plugins=[Worker(order)]))
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


if __name__ == "__main__":
    main()
