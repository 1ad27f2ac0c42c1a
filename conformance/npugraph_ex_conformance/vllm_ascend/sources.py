"""A digest of the files that compute and judge. Runs of two versions of them are no evidence about each other.

A rebase in an editable checkout is enough: one root rounded in another way moves a logprob of a quantised model by 0.06.
"""

from __future__ import annotations

import hashlib
import importlib
from pathlib import Path
from typing import TYPE_CHECKING

import npugraph_ex_autoload

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["digest", "digest_of"]

_PACKAGES = ("npu_emulator", "npugraph_ex_conformance")
"""Beside `npugraph_ex`, a name that may be the bundled backend's."""
_KINDS = frozenset({".py", ".cpp", ".h"})


def digest() -> str:
    """Return the digest of this library, from the folders that this process imports it from."""
    others = [Path(folder) for name in _PACKAGES for folder in importlib.import_module(name).__path__]
    return digest_of([Path(npugraph_ex_autoload.__file__).with_name("npugraph_ex"), *others])


def digest_of(folders: Iterable[Path]) -> str:
    """Return the digest of the sources in folders: their names, relative to the folder, and what they hold."""
    found = hashlib.sha256()
    for folder in folders:
        for path in sorted(path for path in folder.rglob("*") if path.suffix in _KINDS):
            content = path.read_bytes()
            found.update(f"{path.relative_to(folder).as_posix()} {len(content)}\n".encode() + content)
    return found.hexdigest()
