"""Compiled extensions for a real device: their operators are defined from the schemas in their files.

Such an extension links CANN and one release of torch, so it is not loaded. Its schemas are read from its file instead, and
each operator gets its registered or offered kernel; an operator without one raises at its launch. A program that imports the
extension continues as if it were loaded, and one line on stderr says so.
"""

from __future__ import annotations

import re
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from npu_emulator.kernels.missing import Missing

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

    from npu_emulator.kernels.install import Installer
    from npu_emulator.kernels.registry import Registry

__all__ = ["EXTENSIONS", "schemas_in", "stand_in_for_extensions"]

EXTENSIONS = {"vllm_ascend.vllm_ascend_C": "_C_ascend"}
"""The extensions by module name, each with the namespace of its operators."""

_BEGINS_LIKE_A_SCHEMA = re.compile(rb"\w+(\.\w+)?\s*\(")


def schemas_in(library: Path) -> list[str]:
    """The operator schemas among the constant strings of a shared object, in their order, without duplicates."""
    from elftools.elf.elffile import ELFFile

    with library.open("rb") as file:
        constants = ELFFile(file).get_section_by_name(".rodata").data()
    strings = (text for text in constants.split(b"\0") if b"->" in text and _BEGINS_LIKE_A_SCHEMA.match(text))
    return list(dict.fromkeys(text.decode() for text in strings if _is_schema(text)))


def _is_schema(text: bytes) -> bool:
    try:
        torch._C.parse_schema(text.decode())  # noqa: SLF001 - the parser of torch.library, which is its only caller
    except (RuntimeError, UnicodeDecodeError):
        return False
    return True


class _StandIn(MetaPathFinder, Loader):
    """Replaces the extensions at their import."""

    def __init__(self, installer: Installer, registry: Registry) -> None:
        self._installer = installer
        self._registry = registry
        self._libraries: list[torch.library.Library] = []

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Describe an extension that is installed."""
        if fullname not in EXTENSIONS:
            return None
        real = PathFinder.find_spec(fullname, path, target)
        if real is None or real.origin is None:
            return None
        return ModuleSpec(fullname, self, origin=real.origin)

    def exec_module(self, module: ModuleType) -> None:
        """Define the extension's operators and install the known kernels."""
        spec = module.__spec__
        assert spec is not None  # noqa: S101 - ours
        assert spec.origin is not None  # noqa: S101 - as found
        module.__file__ = spec.origin
        namespace = EXTENSIONS[module.__name__]
        library = torch.library.Library(namespace, "FRAGMENT")
        self._libraries.append(library)
        names = [f"{namespace}::{library.define(schema)}" for schema in schemas_in(Path(spec.origin))]
        computed = [name for name in names if self._give_kernel(name, library)]
        sys.stderr.write(
            f"npu_emulator: {module.__name__} holds code for a real NPU and is not loaded; of its {len(names)} operators "
            f"{len(computed)} have a kernel here\n"
        )

    def _give_kernel(self, name: str, library: torch.library.Library) -> bool:
        """Install the kernel of one operator, which also computes its metadata, or a function that raises."""
        compute = self._registry.added.get(name) or self._registry.offered.get(name)
        if compute is None:
            library.impl(name.partition("::")[2], Missing(name), "PrivateUse1")
            return False
        self._installer.add(name, compute)
        torch.library.register_fake(name, getattr(compute, "fake", compute), lib=library)
        return True


def stand_in_for_extensions(installer: Installer, registry: Registry) -> None:
    """Define the operators of `EXTENSIONS` when their modules are imported."""
    sys.meta_path.insert(0, _StandIn(installer, registry))
