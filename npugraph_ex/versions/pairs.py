"""The pairs of torch and torch_npu that the tests run on, and what is wrong with the installed pair. Nothing is imported for it."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

TESTED = {
    "2.10.0": "2.10.0.post4",
    "2.11.0": "2.11.0.post3",
    "2.12.0": "2.12.0.post3",
    "2.13.0": "2.13.0",
    "2.14.0": "2.14.0",
}
"""The release of torch_npu by the release of torch. The full tests run on 2.13 for each change, on all pairs before a release."""

_FIRST_WITH_SHARED_KEYS = (2, 12)


def described() -> str:
    """The pairs in words, for a message."""
    return ", ".join(f"{torch}/{npu}" for torch, npu in TESTED.items())


def untested(torch: str, torch_npu: str) -> str:
    """Say that a pair of versions was not tested; empty if one with the same two minor releases was."""
    if any((_minor(torch), _minor(torch_npu)) == (_minor(a), _minor(b)) for a, b in TESTED.items()):
        return ""
    return (
        f"torch {torch} with torch_npu {torch_npu} is installed; the tested pairs of torch/torch_npu are {described()}"
    )


def untested_here() -> str:
    """`untested` of the installed pair; empty where one of them is not installed."""
    try:
        return untested(metadata.version("torch"), metadata.version("torch_npu"))
    except metadata.PackageNotFoundError:
        return ""


def cuda_build() -> str:
    """The version of CUDA that the installed torch was built for; empty for a CPU build, or without torch."""
    try:
        text = Path(str(metadata.distribution("torch").locate_file("torch/version.py"))).read_text(encoding="utf-8")
    except (metadata.PackageNotFoundError, OSError):
        return ""
    found = re.search(r"^cuda\b.*=\s*['\"](.+)['\"]", text, re.MULTILINE)
    return found[1] if found else ""


def aborts(torch: str, cuda: str) -> str:
    """Say that `import torch` ends the process in this pair; empty if it does not.

    Torch 2.12 and later register settings of its allocator for CUDA, and torch_npu registers settings of the same names.

    Args:
        torch: the version of torch.
        cuda: its version of CUDA, or nothing.
    """
    if not cuda or _minor(torch) < _FIRST_WITH_SHARED_KEYS:
        return ""
    return (
        f"torch {torch} is built for CUDA {cuda}, and torch_npu cannot be loaded beside it: both register the same settings of "
        "the memory allocator, and `import torch` ends the process"
    )


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])
