"""The source files of modules: what an edit of a class, of its bases or of a constant changes, whoever reads it and however.

A file counts as a whole. To ask of a class only for the members that were read would miss a member that is added to it, another
base, or a base's constant that a new one hides.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
import sys
import sysconfig
import weakref
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType

__all__ = ["digest_of", "files_of", "home_of", "is_followed", "is_users", "users_modules"]

_NOT_FOLLOWED = frozenset(
    {"torch", "torch_npu", "npugraph_ex", "npugraph_ex_conformance", "npu_emulator", *sys.stdlib_module_names}
)
"""Their versions are part of every key."""
_PACKAGES = re.compile(r"[/\\](?:site|dist)-packages[/\\]")
"""Folders of installed packages, also of another environment that this one sees."""


def is_followed(module: str | None) -> bool:
    """Whether a module is neither of Python's, nor of torch's, nor of this library's."""
    return module == "__main__" or (module is not None and module.partition(".")[0] not in _NOT_FOLLOWED)


def is_users(module: str | None) -> bool:
    """Whether a module is followed, and not installed as a package."""
    file = getattr(sys.modules.get(module or ""), "__file__", None) or ""
    return is_followed(module) and not (file.startswith(_installed()) or _PACKAGES.search(file))


@cache
def _installed() -> tuple[str, ...]:
    return tuple(sysconfig.get_paths()[name] for name in ("purelib", "platlib"))


def users_modules() -> list[str]:
    """All modules of the user's that are loaded."""
    return [name for name in tuple(sys.modules) if is_users(name)]


def files_of(modules: Iterable[str]) -> dict[str, str]:
    """Digests of the files of modules that are followed, and of all that the user's own among them import, by module.

    Of an installed package the modules that are named are enough: it changes as a whole, and then these do in nearly all cases.
    """
    pending, found = [name for name in modules if is_followed(name)], dict[str, str]()
    while pending:
        name = pending.pop()
        if name in found:
            continue
        found[name] = digest_of(name)
        if is_users(name):
            pending += {other for other in _imported_by(name) if is_users(other)} - found.keys()
    return {name: digest for name, digest in found.items() if digest}


def digest_of(module: str) -> str:
    """A digest of a module's file; empty where it has none, as a notebook's cells.

    Of a module that is loaded it is the one of the first question: what is edited later does not run in this process.
    """
    loaded = sys.modules.get(module)
    if not isinstance(loaded, ModuleType):  # some packages put other objects there
        return _digest(getattr(loaded, "__file__", None) if loaded is not None else _path_of(module))
    if loaded not in _digests:
        _digests[loaded] = _digest(getattr(loaded, "__file__", None))
    return _digests[loaded]


_digests: weakref.WeakKeyDictionary[ModuleType, str] = weakref.WeakKeyDictionary()


def _path_of(module: str) -> str | None:
    with suppress(ImportError, ValueError):  # it, or a package around it, is gone
        spec = importlib.util.find_spec(module)
        return spec.origin if spec is not None and spec.has_location else None
    return None


def _digest(path: str | None) -> str:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest() if path is not None else ""
    except OSError:
        return ""


def _imported_by(module: str) -> Iterator[str]:
    """The modules that a module's globals are, or come from, also those in lists and tables."""
    for value in tuple(getattr(sys.modules.get(module), "__dict__", {}).values()):
        for part in (value, *_held(value)):
            yield part.__name__ if isinstance(part, ModuleType) else home_of(part)


def home_of(value: object) -> str:
    """The module that a class or a function, or the class of another value, was written in."""
    written = value if isinstance(value, (type, FunctionType)) else type(value)
    return written.__module__ if isinstance(written.__module__, str) else ""


def _held(value: object) -> Iterable[object]:
    """What a plain container holds: one of another class may import what it is asked for."""
    if type(value) is dict:
        return tuple(value.values())
    return tuple(value) if type(value) in {list, tuple, set, frozenset} else ()  # type: ignore[arg-type]
