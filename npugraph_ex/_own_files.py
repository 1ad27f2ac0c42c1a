"""Files in the user's cache folder: written whole or not at all, and read only if nobody else could have written them."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from npugraph_ex.errors import SavedGraphError
from npugraph_ex_ownership import distrust


def default_directory() -> Path:
    """``$NPUGRAPH_EX_CACHE``, or ``npugraph_ex`` in the user's cache folder.

    platformdirs would replace the last line, here and in the emulator: torch_npu exists for Linux only.
    """
    chosen = os.environ.get("NPUGRAPH_EX_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "npugraph_ex"


def write_whole(path: Path, content: bytes) -> None:
    """Write a file, readable by its owner alone, so that it is either whole or as it was before."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor, part = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")  # made with mode 600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(part).replace(path)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise


def read_own(path: Path) -> bytes:
    """Read a file that belongs to this user and that nobody else can write.

    Raises:
        SavedGraphError: it is another's, others can write it, or it is a link.
        OSError: it cannot be read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if path.is_symlink():
            raise SavedGraphError(f"{path} is a link; saved compilations are read from plain files only") from error
        raise
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(file.fileno())  # of what was opened, whatever now has the name
        reason = distrust(path, status)
        if reason is not None:
            raise SavedGraphError(f"not read: {reason} (NPUGRAPH_EX_CACHE or cache_dir names the folder)")
        if not stat.S_ISREG(status.st_mode):
            raise SavedGraphError(f"{path} is no file; saved compilations are read from plain files only")
        return file.read()
