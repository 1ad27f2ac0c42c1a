"""A folder of saved compilations: files are whole or absent, and nobody else's are read.

Any number of processes may share a folder. Each writes under a name of its own and then renames, so that the last one
wins and no reader ever sees half a file.
"""

from __future__ import annotations

import glob
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from npugraph_ex._own_files import default_directory, read_own, write_whole
from npugraph_ex.errors import SavedGraphError

SUFFIX = ".nge"
_MAGIC = b"npugraph_ex cache 3\n"


@dataclass(frozen=True)
class CacheEntry:
    """One file.

    Attributes:
        path: where it is.
        header: what it says of itself: the parts of its key, and what was compiled.
        payload: the saved compilation.
    """

    path: Path
    header: Mapping[str, str]
    payload: bytes


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

    def read(self, name: str) -> CacheEntry | None:
        """The entry ``name``; None if there is none.

        Raises:
            SavedGraphError: the file is damaged, or it is another user's; the message says which.
        """
        path = self.path(name)
        return read_entry(path) if path.exists() or path.is_symlink() else None


def read_entry(path: Path) -> CacheEntry:
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
    return CacheEntry(path, json.loads(said), payload)


def _digest(said: bytes, payload: bytes) -> bytes:
    return hashlib.sha256(said + b"\n" + payload).hexdigest().encode()
