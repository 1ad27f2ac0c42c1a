"""The type of options that name a file to write: what cannot be written is refused before the work, not when it is done."""

from __future__ import annotations

import argparse
from pathlib import Path


def output_file(text: str) -> Path:
    """A type for argparse: a file in a folder that is there, which this user may write."""
    file = Path(text)
    if why := unwritable(file):
        raise argparse.ArgumentTypeError(why)
    return file


def unwritable(file: Path) -> str:
    """Why a file cannot be written; empty where it can. A file that is there stays as it is, and none is left behind."""
    if not file.parent.is_dir():
        return f"there is no folder {str(file.parent)!r} to write in; make it first"
    there = file.exists()
    if there and not (file.is_file() or file.is_dir()):  # another kind, such as a pipe, might wait for its reader
        return ""
    try:
        file.open("a", encoding="utf-8").close()
    except OSError as error:
        return f"{file} cannot be written: {error.strerror}"
    if not there:
        file.unlink(missing_ok=True)  # another rank may have asked, too
    return ""
