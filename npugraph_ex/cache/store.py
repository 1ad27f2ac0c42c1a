"""A folder of saved compilations: files are whole or absent, and nobody else's are read.

Any number of processes may share a folder. Each writes under a name of its own and then renames, so that the last one
wins and no reader ever sees half a file.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from npugraph_ex.errors import SavedGraphError
from npugraph_ex_ownership import distrust

SUFFIX = ".nge"
_MAGIC = b"npugraph_ex cache 1\n"


@dataclass(frozen=True)
class Entry:
    """One file.

    Attributes:
        path: where it is.
        header: what it says of itself: the parts of its key, and what was compiled.
        payload: the saved compilation.
    """

    path: Path
    header: Mapping[str, str]
    payload: bytes


def default_directory() -> Path:
    """``$NPUGRAPH_EX_CACHE``, or ``npugraph_ex`` in the user's cache folder."""
    chosen = os.environ.get("NPUGRAPH_EX_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "npugraph_ex"


class Store:
    """The files of one folder.

    Args:
        directory: made, for its owner alone, when something is written.
    """

    def __init__(self, directory: Path | str | None = None) -> None:
        self.directory = Path(directory) if directory is not None else default_directory()

    def path(self, name: str) -> Path:
        """Where the entry ``name`` is or would be."""
        return self.directory / f"{name}{SUFFIX}"

    def entries(self) -> Iterator[Path]:
        """Every file of the folder and of the folders in it, by name."""
        return iter(sorted(self.directory.rglob(f"*{SUFFIX}")))

    def variants(self, base: str) -> list[Path]:
        """The files of one function, for whatever inputs: those whose name is ``base`` and a signature, the latest first."""
        found = [(path.lstat().st_mtime, path) for path in self.directory.glob(f"{glob.escape(base)}-*{SUFFIX}")]
        return [path for _, path in sorted(found, reverse=True)]

    def write(self, name: str, header: Mapping[str, str], payload: bytes) -> Path:
        """Keep ``payload`` under ``name``.

        Raises:
            OSError: the folder cannot be written.
        """
        said = json.dumps(dict(header), sort_keys=True).encode()
        content = b"".join((_MAGIC, _digest(said, payload), b"\n", said, b"\n", payload))
        path = self.path(name)
        write_whole(path, content)
        return path

    def read(self, name: str) -> Entry | None:
        """The entry ``name``; None if there is none.

        Raises:
            SavedGraphError: the file is damaged, or it is another user's; the message says which.
        """
        path = self.path(name)
        return read_entry(path) if path.exists() or path.is_symlink() else None


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


def read_entry(path: Path) -> Entry:
    """Read one file of a store.

    Raises:
        SavedGraphError: as `Store.read`.
    """
    content = read_own(path)
    if not content.startswith(_MAGIC):
        raise SavedGraphError(f"{path} is no saved compilation of this version of npugraph_ex")
    digest, _, rest = content.removeprefix(_MAGIC).partition(b"\n")
    said, _, payload = rest.partition(b"\n")
    if digest != _digest(said, payload):
        raise SavedGraphError(f"{path} is cut off or was changed since it was written")
    return Entry(path, json.loads(said), payload)


def _digest(said: bytes, payload: bytes) -> bytes:
    return hashlib.sha256(said + b"\n" + payload).hexdigest().encode()
