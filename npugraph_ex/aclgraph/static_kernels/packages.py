"""Built packages, kept for every process that needs the same kernels: one process builds, the others wait and reuse."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

from npugraph_ex._own_files import read_own, write_whole
from npugraph_ex.aclgraph.static_kernels.locks import locked
from npugraph_ex.errors import SavedGraphError, StaticKernelError
from npugraph_ex.observe.logger import logger

_MANIFEST = "manifest.json"
_SPARE = 60.0  # seconds of a build besides the compiler


def obtain(root: Path, key: str, build: Callable[[], list[Path]], *, limit: float) -> list[Path]:
    """The packages for a key: existing ones, or new ones.

    Args:
        root: the folder that all processes share.
        key: the digest of their sources and of the machine.
        build: makes them, on the same file system.
        limit: the largest number of seconds for a build.

    Raises:
        StaticKernelError: the build failed, here or in the process that this one waited for.
    """
    folder, failure = root / "packages" / key, root / "packages" / f"{key}.failed"
    before = _version(failure)
    with locked(root / "packages" / f"{key}.lock", limit + _SPARE):
        found = _sound(folder)
        if found:
            return found
        if _version(failure) not in {None, before}:  # another process failed while this one waited
            raise StaticKernelError(failure.read_text(encoding="utf-8"))
        try:
            made = build()
        except StaticKernelError as error:
            write_whole(failure, str(error).encode())
            raise
        failure.unlink(missing_ok=True)
        return _keep(folder, made)


def _version(failure: Path) -> tuple[int, int] | None:
    """Which file it is, as each failure makes a new one; None if there is none. Times alone are too coarse to compare."""
    try:
        found = failure.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def _keep(folder: Path, made: list[Path]) -> list[Path]:
    """Move packages to their folder, so that the folder is complete or absent."""
    staging = made[0].parent / "kept"
    staging.mkdir()
    for package in made:
        package.chmod(0o700)
        package.rename(staging / package.name)
    manifest = {package.name: _digest(package) for package in sorted(staging.iterdir())}
    write_whole(staging / _MANIFEST, json.dumps(manifest).encode())
    shutil.rmtree(folder, ignore_errors=True)
    staging.rename(folder)
    return [folder / name for name in manifest]


def _sound(folder: Path) -> list[Path]:
    """The packages of a folder. Empty if the folder is missing or a package fails its checksum, because packages are executed."""
    if not folder.exists():
        return []
    try:
        manifest = json.loads(read_own(folder / _MANIFEST))
        for name, digest in manifest.items():
            if _digest(folder / name) != digest:
                raise SavedGraphError(f"{folder / name} was changed since it was built")
    except (OSError, ValueError, AttributeError) as error:
        logger.warning("Static kernels are compiled anew: %s", error)
        return []
    return [folder / name for name in manifest]


def _digest(package: Path) -> str:
    return hashlib.sha256(read_own(package)).hexdigest()
