"""The report folder: whether a run may use it, who writes in it, and where the results of earlier runs go.

A new run never overwrites results: before its first test it moves what it finds to ``earlier/1``, ``earlier/2`` and so on,
and deletes the oldest there.
"""

from __future__ import annotations

import contextlib
import difflib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

SCRIPTS = "failures"
"""The folder, in the report folder, of the scripts that reproduce failures."""
_EARLIER = "earlier"
_KEPT = 20
"""So many earlier runs are kept."""
_OURS = ("report.html", "junit.xml", "tests.jsonl", "cases.jsonl", "slowest.json", SCRIPTS)
"""Everything that a run writes. Other files of the folder are somebody else's and stay where they are."""


class FolderError(Exception):
    """The report folder cannot be used as it was asked for; the message says why and what to do."""


def prepare(folder: Path, *, resume: bool) -> int:
    """Make the folder, and keep other runs out of it for as long as this process lives.

    Returns:
        The lock: a descriptor, to be closed when the run is over.

    Raises:
        FolderError: it is a file, cannot be written, is used by another run, or holds no run to resume.
    """
    if resume and not (folder / "tests.jsonl").is_file():
        raise FolderError(_nothing_to_resume(folder))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except (FileExistsError, NotADirectoryError) as error:
        raise FolderError(f"--report-dir takes a folder; {_file_in(folder)} is a file.") from error
    except OSError as error:
        raise FolderError(f"--report-dir {folder} cannot be used: {error.strerror}.") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        os.close(lock)
        raise FolderError(f"--report-dir {folder} cannot be written by this user.")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise FolderError(
            f"another run writes to {folder} now; wait for it, or choose another --report-dir."
        ) from error
    except OSError:
        pass  # a file system without locks: two runs at once are then the user's own care
    return lock


def _file_in(path: Path) -> Path:
    """The part of a path that is no folder."""
    return next((part for part in (path, *path.parents) if part.exists() and not part.is_dir()), path)


def _nothing_to_resume(folder: Path) -> str:
    if folder.exists() and not folder.is_dir():
        return f"--report-dir takes a folder; {folder} is a file."
    if folder.is_dir():
        return (
            f"--resume: {folder} holds no run; one that was stopped before its first test began leaves none. "
            "Start a new run without --resume, or name the folder of the run to go on with."
        )
    with contextlib.suppress(OSError):
        others = [path.parent.name for path in folder.absolute().parent.glob("*/tests.jsonl")]
        close = difflib.get_close_matches(folder.absolute().name, others, n=1)
        if close:
            return f"--resume: there is no folder {folder}; did you mean {folder.parent / close[0]}?"
    return f"--resume: there is no folder {folder}. Name the folder of the run to go on with, or start a new run without --resume."


def next_earlier(folder: Path) -> Path | None:
    """Where the results that are in the folder will be put; None if there are none."""
    if not any((folder / name).exists() for name in _OURS):
        return None
    return folder / _EARLIER / str(max(_numbers(folder), default=0) + 1)


def _numbers(folder: Path) -> list[int]:
    """Of the earlier runs, the oldest first."""
    return sorted(int(path.name) for path in (folder / _EARLIER).glob("*") if path.name.isdecimal())


def put_aside(folder: Path, *, copy: bool = False) -> Path | None:
    """Move, or copy, the results that are in the folder to a folder of their own; answer which."""
    place = next_earlier(folder)
    if place is None:
        return None
    place.mkdir(parents=True)
    for name in _OURS:
        path = folder / name
        if path.is_dir() and copy:
            shutil.copytree(path, place / name)
        elif path.exists() and copy:
            shutil.copy2(path, place / name)
        elif path.exists():
            path.rename(place / name)
    for number in _numbers(folder)[:-_KEPT]:
        shutil.rmtree(folder / _EARLIER / str(number))
    return place


def write_whole(path: Path, text: str) -> None:
    """Replace a file as a whole."""
    descriptor, part = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        mask = os.umask(0)
        os.umask(mask)
        Path(part).chmod(0o666 & ~mask)  # as a file that is simply opened has; mkstemp's is the owner's alone
        Path(part).replace(path)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise
