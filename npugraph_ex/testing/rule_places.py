"""Where replacements come from, as a command line names it: ``MODULE``, ``MODULE:NAME`` or a file. Nothing here imports torch."""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from pathlib import Path

from npugraph_ex.errors import AddressedError, UsageError


class RulesNotFoundError(UsageError):
    """The module cannot be imported, or registers nothing; the message says which and why."""

    @property
    def address(self) -> str:
        """That of the error which the module raised, if it has one. The mistake is there, not in the module's name."""
        return self.__cause__.address if isinstance(self.__cause__, AddressedError) else super().address


def split(spec: str) -> tuple[str, str]:
    """The module or file, and the name in it or an empty text.

    Raises:
        RulesNotFoundError: it is neither a name nor a path, or there is no such file, module or package.
    """
    source, colon, name = spec.rpartition(":")
    if not colon:
        source, name = spec, ""
    if source.strip("./") and Path(source).is_dir() and not source.isidentifier():
        raise a_folder(source)
    if not _is_module_or_file(source) or (colon and not name.isidentifier()):
        raise RulesNotFoundError(
            f"{spec!r} must be MODULE or MODULE:NAME, the module a name or the path of a .py file."
        )
    if source.endswith(".py"):
        if not Path(source).is_file():
            raise RulesNotFoundError(f"there is no file {source!r}.")
    elif source not in sys.modules and PathFinder.find_spec(source.partition(".")[0], ["", *sys.path]) is None:
        raise no_module(source)
    return source, name


def a_folder(name: str) -> RulesNotFoundError:
    """The error for a folder, which may hold several modules."""
    return RulesNotFoundError(f"{name!r} is a folder; name a module, or the path of a .py file, in it.")


def no_module(name: str) -> RulesNotFoundError:
    """The error for a module that is nowhere."""
    return RulesNotFoundError(f"there is no module {name!r} on the path or in {Path.cwd()}; for a file, name it *.py.")


def _is_module_or_file(source: str) -> bool:
    return source.endswith(".py") or all(part.isidentifier() for part in source.split("."))
