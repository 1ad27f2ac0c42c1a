"""Installs compiled kernels for this process: in its own folder if CANN supports that, else in CANN's folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from npugraph_ex.aclgraph import _npu_private
from npugraph_ex.aclgraph.static_kernels import programs
from npugraph_ex.aclgraph.static_kernels.lease import Lease, everything_locked, uninstallers
from npugraph_ex.errors import StaticKernelError

_LIMIT = 300.0  # seconds that a package may take to install itself


def install(packages: Sequence[Path], lease: Lease) -> None:
    """Install packages and make CANN choose kernels again.

    Raises:
        StaticKernelError: a package failed, or installed nothing.
    """
    own_folder = _npu_private.kernels_in_a_folder()
    for package in packages:
        log = lease.work() / "install.log"
        if own_folder:
            lease.kernels.mkdir(exist_ok=True)
            before = sum(1 for _ in lease.kernels.rglob("*"))
            programs.run([package, f"--install-path={lease.kernels}", "-q"], log=log, limit=_LIMIT)
            installed = sum(1 for _ in lease.kernels.rglob("*")) > before
        else:
            # CANN has one index of all packages there, and two installations at the same time would corrupt it.
            with everything_locked(lease.root):
                lease.note_installed(package.stem)
                if not uninstallers(package.stem):  # another process may have installed it
                    programs.run([package], log=log, limit=_LIMIT)
                installed = bool(uninstallers(package.stem))
        if not installed:
            raise StaticKernelError(f"the package {package.name} ended without an error and installed nothing")
    _npu_private.choose_kernels_anew(lease.kernels if own_folder else None)
