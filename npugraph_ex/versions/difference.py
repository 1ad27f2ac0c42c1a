"""The record of a difference between releases of torch, and which side of it is installed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module, metadata
from pkgutil import iter_modules


@cache
def installed(package: str = "torch") -> tuple[int, int]:
    """The release of a package that is installed, such as (2, 13), from its metadata."""
    major, minor = metadata.version(package).split(".")[:2]
    return int(major), int(minor)


@dataclass(frozen=True, kw_only=True)
class VersionDifference:
    """Something that older releases of torch or torch_npu do in another way, or cannot do.

    Attributes:
        what: the difference, in one sentence.
        since: the first release of torch with the newer form; the older supported releases have the other one.
        new: private names that only the releases since then have.
        old: private names that only the releases before have.
        test: the file of tests that fail without the module, from the root of the repository.
    """

    what: str
    since: tuple[int, int]
    new: tuple[str, ...] = ()
    old: tuple[str, ...] = ()
    test: str

    @property
    def older(self) -> bool:
        """Whether the installed torch is older than the newer form."""
        return installed() < self.since

    @property
    def absent(self) -> tuple[str, ...]:
        """The private names that the installed torch lacks, as this record says."""
        return self.new if self.older else self.old


def differences() -> dict[str, VersionDifference]:
    """Every difference that is known, by its module."""
    package = import_module("npugraph_ex.versions")
    modules = [import_module(f"{package.__name__}.{found.name}") for found in iter_modules(package.__path__)]
    return {module.__name__: module.DIFFERENCE for module in modules if hasattr(module, "DIFFERENCE")}
