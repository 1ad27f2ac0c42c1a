"""Putting compiled kernels in place for this process: in a folder of its own where CANN can, else in CANN's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from npugraph_ex.aclgraph import _npu_private
from npugraph_ex.aclgraph.static_kernels import programs
from npugraph_ex.aclgraph.static_kernels.lease import Lease, everything_locked, uninstallers
from npugraph_ex.errors import StaticKernelError

_LIMIT = 300.0  # seconds that a package may take to install itself


def install(packages: Sequence[Path], lease: Lease) -> None:
    """Install packages and have CANN choose kernels anew.

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
            # CANN keeps one index of all packages there, which two installations at once would spoil.
            with everything_locked(lease.root):
                lease.note_installed(package.stem)
                if not uninstallers(package.stem):  # another process may have it there already
                    programs.run([package], log=log, limit=_LIMIT)
                installed = bool(uninstallers(package.stem))
        if not installed:
            raise StaticKernelError(f"the package {package.name} ended without an error and installed nothing")
    _npu_private.choose_kernels_anew(lease.kernels if own_folder else None)
