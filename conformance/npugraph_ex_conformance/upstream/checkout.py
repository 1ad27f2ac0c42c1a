"""The test files of a checkout, and which chips their tests ask for. Reads files; imports and runs none."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from npugraph_ex._plurals import counted, noun
from npugraph_ex.errors import UsageError

DEFAULT_CHIP = "Ascend910B2"
"""Where a test names no chip, or the 910B among others."""
_CHIPS = re.compile(r"SupportedDevices\(\[?([^\])]*)")
_TEST = re.compile(r"def test")
_NAME = re.compile(r"Ascend\w+")
_PROJECTS = {"op_plugin": "op-plugin", "torch_npu": "torch_npu"}
"""The folder that a checkout has, and the project's name."""


@dataclass(frozen=True)
class Checkout:
    """Another project's tests.

    Attributes:
        project: ``"op-plugin"``, ``"torch_npu"``, or for any other one the name of its folder.
        tests: the folder ``test`` of the checkout.
        files: the test files that were asked for, in order.
    """

    project: str
    tests: Path
    files: tuple[Path, ...]

    def name(self, file: Path) -> str:
        """A file's name below the folder of tests."""
        return file.relative_to(self.tests).as_posix()


def find(path: Path, pattern: str = "*") -> Checkout:
    """The test files below ``path``: a checkout, or a folder or file in its folder ``test``.

    Args:
        path: what to look at.
        pattern: only files whose name below ``test`` matches it, or has it as a part.

    Raises:
        UsageError: there is no such folder, or no such file in it.
    """
    path = path.resolve()
    if not path.exists():
        raise UsageError(
            f"there is no {str(path)!r}; name a checkout of op-plugin or torch_npu, or a folder or file of its tests"
        )
    inside = [path / "test", *(place for place in (path, *path.parents) if place.name == "test")]
    tests = next((place for place in inside if place.is_dir()), None)
    if tests is None:
        raise UsageError(
            f"{str(path)!r} has no folder 'test' and lies in none; name a checkout of op-plugin or torch_npu"
        )
    below = tests if path == tests.parent else path
    found = [below] if below.is_file() else sorted(below.rglob("test_*.py"))
    named = {file: file.relative_to(tests).as_posix() for file in found}
    chosen = tuple(file for file, name in named.items() if fnmatch(name, pattern) or pattern in name)
    if not chosen:
        there = f"there {noun(len(found), 'is', 'are')} {counted(len(found), 'test file')}"
        raise UsageError(f"no test file below {str(below)!r} matches {pattern!r}; {there}")
    known = (project for folder, project in _PROJECTS.items() if (tests.parent / folder).is_dir())
    return Checkout(next(known, tests.parent.name), tests, chosen)


def first_chip(file: Path, chips: tuple[str, ...]) -> str:
    """The chip to begin a file with: the default one, unless each of its tests names chips and none names that one."""
    text = file.read_text(encoding="utf-8", errors="replace")
    asked = _CHIPS.findall(text)
    named = " ".join(asked)
    usual = len(asked) < len(_TEST.findall(text)) or any(DEFAULT_CHIP.startswith(name) for name in _NAME.findall(named))
    return DEFAULT_CHIP if usual else next(chips_in(named, chips), DEFAULT_CHIP)


def chips_in(reason: str, chips: tuple[str, ...]) -> Iterator[str]:
    """The emulated chips that a text names, such as the reason of a skip: one for each name or family."""
    before, _, _ = reason.partition("current device")
    for name in _NAME.findall(before):
        found = next((chip for chip in (DEFAULT_CHIP, *chips) if chip.startswith(name)), None)
        if found is not None:
            yield found
