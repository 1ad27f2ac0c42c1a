"""Children of an emulated process (DataLoader workers, compile workers, `subprocess`) are emulated too.

A child learns this from its environment: `NPU_EMULATOR=1`, the settings, and the folder of the runtime in LD_LIBRARY_PATH,
without which its own `import torch` could not load torch_npu. That import then calls `resume_in_child` of `activation.py`, through
one of torch's entry points. A program that asks the driver's `npu-smi` finds the emulated device's.
"""

from __future__ import annotations

import os
import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from npu_emulator.compilation import LIBRARIES, MARK
from npu_emulator.settings import PYTHON, RELATIVES, SWITCH

if TYPE_CHECKING:
    from npu_emulator.settings import Settings

__all__ = ["announce", "announced", "is_ours"]

_PATH = "LD_LIBRARY_PATH"
_LINKING = "LIBRARY_PATH"
"""Where a compiler looks for `-lascendcl`: a program may build an extension that calls CANN."""
_COMMANDS = str(Path(__file__).parent / "bin")
"""The folder of `npu-smi`."""


def announce(settings: Settings, folder: Path) -> None:
    """Write the settings for children into this process's environment."""
    os.environ[SWITCH] = "1"
    for field in fields(settings):
        value = getattr(settings, field.name)
        if value is None:
            continue  # not set here either, so a child finds the same default as this process
        os.environ[f"{SWITCH}_{field.name.upper()}"] = str(int(value) if isinstance(value, bool) else value)
    for name in (_PATH, _LINKING):
        others = [entry for entry in os.environ.get(name, "").split(os.pathsep) if entry and not is_ours(Path(entry))]
        os.environ[name] = os.pathsep.join([str(folder), *others])
    os.environ[PYTHON] = sys.executable
    if not Path(os.environ.get(RELATIVES, "")).is_file():  # memory without a name on the disk (runtime/relatives.cpp)
        shared = os.memfd_create("npu_emulator_relatives", os.MFD_CLOEXEC)
        os.environ[RELATIVES] = f"/proc/{os.getpid()}/fd/{shared}"
    commands = os.environ.get("PATH", os.defpath).split(os.pathsep)
    if _COMMANDS not in commands:
        os.environ["PATH"] = os.pathsep.join([_COMMANDS, *commands])


def announced() -> list[Path]:
    """Return the libraries that the parent announced; empty without an emulated parent.

    A child may find another copy of this package, with other libraries. But the loader has already loaded the parent's
    libraries for torch_npu, and a second device would have separate memory.
    """
    entries = os.environ.get(_PATH, "").split(os.pathsep)
    folder = next((Path(entry) for entry in entries if entry and is_ours(Path(entry))), None)
    return [] if folder is None else [folder / name for name in LIBRARIES]


def is_ours(folder: Path) -> bool:
    """Tell whether a folder contains a built emulator rather than CANN."""
    return (folder / MARK).exists()
