"""Compiles the emulated device into the wheel, so that nobody who installs the wheel needs a compiler.

`CXX` names the compiler, also one for another machine: the libraries themselves say for which machine and which C library
they are. `NPU_EMULATOR_COMPILED=0` leaves them out; the wheel is then for any machine, and the emulated device is compiled on
first use. So it is in an editable installation, where the sources change.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_SWITCH = "NPU_EMULATOR_COMPILED"
_MACHINES = {"EM_X86_64": "x86_64", "EM_AARCH64": "aarch64"}


class RuntimeHook(BuildHookInterface[Any]):
    """The hook that hatchling calls before and after it writes a wheel."""

    _folder: str | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and have the result packed and the wheel named after it."""
        if version == "editable" or os.environ.get(_SWITCH) == "0":
            return
        sys.path.insert(0, self.root)
        from npu_emulator.compilation import LIBRARIES, build
        from npu_emulator.errors import BuildError

        self._folder = tempfile.mkdtemp()
        try:
            build(Path(self._folder), standalone=True)
        except BuildError as error:
            self.clean_up()
            sys.exit(f"{error}\nTo make a wheel without the compiled emulated device, set {_SWITCH}=0.")
        build_data["force_include"][self._folder] = "npu_emulator/compiled"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform_of(Path(self._folder) / LIBRARIES[0])}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002 - hatchling's
        """Remove what was packed."""
        self.clean_up()

    def clean_up(self) -> None:
        """Remove the folder of the libraries."""
        if self._folder:
            shutil.rmtree(self._folder)


def platform_of(library: Path) -> str:
    """Return the platform tag of PEP 600: the newest version of the GNU C library that the library asks for, its machine."""
    from elftools.elf.elffile import ELFFile

    with library.open("rb") as file:
        elf = ELFFile(file)
        needs = elf.get_section_by_name(".gnu.version_r").iter_versions()
        names = [version.name for _, versions in needs for version in versions]
        machine = _MACHINES[elf["e_machine"]]
    glibc = [tuple(map(int, name.removeprefix("GLIBC_").split("."))) for name in names if name.startswith("GLIBC_")]
    return f"manylinux_{'_'.join(map(str, max(*glibc, (2, 17))[:2]))}_{machine}"
