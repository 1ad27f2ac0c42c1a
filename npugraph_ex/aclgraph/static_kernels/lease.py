"""The static kernels of one process, listed in files, so that the next process can remove those of a killed process.

Each process has a folder `<root>/processes/<pid>-<random>`:

* `lease` is locked for as long as the process lives;
* `kernels` has the kernels that only this process uses, and `work-…` has unfinished files;
* `installed` names the packages in CANN's own folder, one in each line, written before the installation;
* `compiler` has the id of its running compiler.

A process that opens a lease first removes the files of every process whose lease is no longer locked.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import tempfile
from pathlib import Path

from npugraph_ex.aclgraph.static_kernels import programs
from npugraph_ex.aclgraph.static_kernels.locks import locked, open_for_lock, try_lock
from npugraph_ex.errors import StaticKernelError
from npugraph_ex.observe.logger import logger

_CLEARING_LIMIT = 600.0
"""Seconds that a process waits for the lock of the whole folder, to install or to clear up."""
_UNINSTALL_LIMIT = 60.0
_ENDING_LIMIT = 30.0
"""Seconds that a process waits for that lock at its end."""


class Lease:
    """This process's folder; open it with `Lease.current`.

    Attributes:
        root: the folder that all processes share.
        folder: this process's own.
        have: digests of the descriptions that have a kernel in this process.
    """

    def __init__(self, root: Path, folder: Path, descriptor: int) -> None:
        self.root = root
        self.folder = folder
        self.have: set[str] = set()
        self._pid = os.getpid()
        self._descriptor = descriptor

    @classmethod
    def current(cls, root: Path) -> Lease:
        """This process's lease on ``root``; the first call makes it, after the files of ended processes are removed."""
        lease = _leases.get((root, os.getpid()))
        if lease is None:
            with everything_locked(root):
                _collect(root)
                folder = Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=root / "processes"))
                descriptor = open_for_lock(folder / "lease")
                try_lock(descriptor)  # nobody else has it: the folder is new
            lease = _leases[root, os.getpid()] = cls(root, folder, descriptor)
            atexit.register(lease.close)
        return lease

    def work(self) -> Path:
        """A new folder for unfinished files; it is removed with the lease."""
        return Path(tempfile.mkdtemp(prefix="work-", dir=self.folder))

    @property
    def kernels(self) -> Path:
        """Where kernels are installed for this process alone."""
        return self.folder / "kernels"

    def note_installed(self, name: str) -> None:
        """Note the name of a package before its installation in CANN's folder."""
        with (self.folder / "installed").open("a", encoding="utf-8") as file:
            file.write(f"{name}\n")

    def note_compiler(self, pid: int) -> None:
        """Note the compiler's process id, so that another process can stop it if this process is killed."""
        (self.folder / "compiler").write_text(f"{pid} {_start_of(pid)}", encoding="ascii")

    def close(self) -> None:
        """Uninstall and remove this process's kernels. A forked child does nothing."""
        if self._pid != os.getpid() or _leases.pop((self.root, self._pid), None) is None:
            return
        try:
            with everything_locked(self.root, _ENDING_LIMIT):
                _clear(self.root, self.folder)
                os.close(self._descriptor)
        except (OSError, StaticKernelError) as error:  # the next process will do it
            logger.warning("Static kernels of this process are not cleared up: %s", error)


_leases: dict[tuple[Path, int], Lease] = {}
"""By folder and process id, because a forked child has no lease yet."""


def everything_locked(root: Path, limit: float = _CLEARING_LIMIT) -> contextlib.AbstractContextManager[None]:
    """Prevent installations, clean-ups and new leases of all other processes under ``root`` during a block."""
    (root / "processes").mkdir(parents=True, exist_ok=True, mode=0o700)
    return locked(root / "lock", limit)


def _collect(root: Path) -> None:
    """Remove the files of every process that has ended."""
    for folder in sorted((root / "processes").iterdir()):
        descriptor = open_for_lock(folder / "lease")  # missing if the process was killed at the start
        try:
            if try_lock(descriptor):
                logger.info("Clearing up static kernels of process %s, which has ended", folder.name.partition("-")[0])
                _clear(root, folder)
        finally:
            os.close(descriptor)


def _clear(root: Path, folder: Path) -> None:
    """Undo everything that one process did, except packages in CANN's folder that other processes use too."""
    _stop_compiler(folder / "compiler")
    others = {name for other in (root / "processes").iterdir() if other != folder for name in _installed(other)}
    for name in _installed(folder) - others:
        for script in uninstallers(name):
            try:
                programs.run([script], log=folder / "uninstall.log", limit=_UNINSTALL_LIMIT)
            except StaticKernelError as error:
                logger.warning("The static kernels %s stay installed in CANN's folder: %s", name, error)
    shutil.rmtree(folder, ignore_errors=True)


def _installed(folder: Path) -> set[str]:
    try:
        return set((folder / "installed").read_text(encoding="utf-8").splitlines())
    except FileNotFoundError:
        return set()


def uninstallers(name: str) -> list[Path]:
    """The programs that remove a package from CANN's folder; none if it is not installed."""
    home = os.environ.get("ASCEND_HOME_PATH")
    if not home:
        return []
    # CANN's folder may have several versions beside it, with links between them.
    found = Path(home).resolve().parent.glob(f"*/opp/static_kernel/ai_core/{name}/uninstall.sh")
    return sorted({script.resolve() for script in found})


def _stop_compiler(noted: Path) -> None:
    """Kill the compiler of a process that ended during compilation. Compare the start times, because the id may be reused."""
    try:
        pid, start = noted.read_text(encoding="ascii").split()
    except (FileNotFoundError, ValueError):
        return
    if start and start == _start_of(int(pid)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(int(pid), signal.SIGKILL)


def _start_of(pid: int) -> str:
    """The start time of a process in the system's ticks; empty if the process does not exist."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
    return status.rpartition(")")[2].split()[19]
