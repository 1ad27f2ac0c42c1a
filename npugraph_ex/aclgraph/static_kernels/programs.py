"""Runs CANN's compiler and the packages that it makes. Each has a time limit and leaves no process."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from npugraph_ex.errors import StaticKernelError

COMPILER = "op_compiler"
_SHOWN = 300  # characters of a failed program's output


def find_compiler() -> Path:
    """CANN's ``op_compiler``: the first on PATH, else the one of the CANN that ASCEND_HOME_PATH names.

    Raises:
        StaticKernelError: there is no compiler.
    """
    home = os.environ.get("ASCEND_HOME_PATH")
    found = shutil.which(COMPILER) or (home and shutil.which(COMPILER, path=str(Path(home) / "bin")))
    if not found:
        raise StaticKernelError(
            f"CANN's {COMPILER} is neither on PATH nor in ASCEND_HOME_PATH/bin; source CANN's set_env.sh, or leave the "
            "option static_kernel_compile out"
        )
    return Path(found)


def compile_descriptions(
    compiler: Path, descriptions: Path, into: Path, *, soc: str, limit: float, started: Callable[[int], object]
) -> list[Path]:
    """Let CANN compile every description of a folder.

    Args:
        compiler: what `find_compiler` found.
        descriptions: the folder of JSON files.
        into: an empty folder, where packages are made.
        soc: for which chip, as in ``Ascend910B3``.
        limit: seconds after which the compiler is stopped.
        started: called with the compiler's process id.

    Returns:
        The packages, programs that install themselves; at least one.

    Raises:
        StaticKernelError: the compiler failed, took too long, or made no package.
    """
    jobs = len(os.sched_getaffinity(0))
    command = [compiler, "-p", descriptions, "-v", soc, "-l", "error", "-j", jobs, "-o", into]
    run(command, log=into / "op_compiler.log", limit=limit, started=started)
    packages = sorted(into.glob("*.run"))
    if not packages:
        raise StaticKernelError(
            f"{COMPILER} ended without an error and without a package{_said(into / 'op_compiler.log')}"
        )
    return packages


def run(
    command: Sequence[object], *, log: Path, limit: float, started: Callable[[int], object] = lambda _pid: None
) -> None:
    """Run a program to its end, in a process group of its own.

    Args:
        command: the program and its arguments.
        log: the file for its output. Not a pipe, because a process that it leaves behind could keep a pipe open for ever.
        limit: seconds after which the whole group is killed.
        started: called with the process id.

    Raises:
        StaticKernelError: it cannot be started, failed, or took too long. The message has the end of its output.
    """
    name = Path(str(command[0])).name
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(  # noqa: S603 - CANN's program, or the package that it made
                list(map(str, command)), stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
        except OSError as error:
            raise StaticKernelError(f"{name} cannot be started: {error.strerror}") from error
    try:
        started(process.pid)
        status = process.wait(limit)
    except BaseException as error:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if isinstance(error, subprocess.TimeoutExpired):
            raise StaticKernelError(f"{name} was stopped after {limit:g} seconds{_said(log)}") from None
        raise
    if status != 0:
        raise StaticKernelError(f"{name} failed with exit status {status}{_said(log)}")


def _said(log: Path) -> str:
    """The end of a program's output, for a message."""
    text = " ".join(log.read_text(encoding="utf-8", errors="replace").split())[-_SHOWN:]
    return f"; it said: {text}" if text else ""
