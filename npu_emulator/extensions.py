"""Compiled extensions for a real device: loaded as shipped, or their operators are defined from the schemas in their files.

Such an extension links CANN, whose libraries the runtime has, and one release of torch. Beside that release it is loaded. Beside
another one the loader finds symbols missing, or the extension's package asks for the other release; then its schemas are read
from its file instead. Either way each operator gets its registered or offered kernel, an operator without one raises at its
launch, and one line on stderr says what was done.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import re
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ExtensionFileLoader, ModuleSpec, PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from packaging.requirements import Requirement

from npu_emulator.compilation import OF_EXTENSIONS
from npu_emulator.kernels.missing import Missing
from npu_emulator.kernels.registry import overload_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

    from npu_emulator.kernels.install import Installer
    from npu_emulator.kernels.registry import Registry

__all__ = ["EXTENSIONS", "install_loader", "schemas_in"]


class Extension(NamedTuple):
    """An extension: the namespace of its operators, and the distribution that it comes in, which says for which torch it is."""

    namespace: str
    distribution: str


EXTENSIONS = {"vllm_ascend.vllm_ascend_C": Extension("_C_ascend", "vllm-ascend")}
"""The extensions by module name."""

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


class _Loader(MetaPathFinder, Loader):
    """Imports the extensions."""

    def __init__(self, installer: Installer, registry: Registry, libraries: Path) -> None:
        self._installer = installer
        self._registry = registry
        self._cann = libraries
        self._shipped: dict[str, ExtensionFileLoader] = {}
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

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Load the file if it is for this torch; None leaves it to its schemas."""
        assert spec.origin is not None  # noqa: S101 - as found
        spec.loader_state = _other_torch(EXTENSIONS[spec.name].distribution)
        if spec.loader_state:
            return None
        loader = ExtensionFileLoader(spec.name, spec.origin)
        try:
            for name in OF_EXTENSIONS:
                ctypes.CDLL(str(self._cann / name), mode=ctypes.RTLD_GLOBAL)
            module = loader.create_module(spec)
        except (ImportError, OSError) as error:
            spec.loader_state = str(error).rpartition(": ")[2]
            return None
        self._shipped[spec.name] = loader
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the extension's operators the known kernels; define those of one that was not loaded."""
        spec = module.__spec__
        assert spec is not None  # noqa: S101 - ours
        assert spec.origin is not None  # noqa: S101 - as found
        namespace = EXTENSIONS[spec.name].namespace
        library = torch.library.Library(namespace, "FRAGMENT")
        self._libraries.append(library)
        shipped = self._shipped.get(spec.name)
        if shipped is not None:
            shipped.exec_module(module)
            done, names = "is loaded as shipped", list(filter(overload_of, _names(namespace)))
        else:
            module.__file__ = spec.origin
            done = f"is defined from its schemas and not loaded ({spec.loader_state})"
            names = [f"{namespace}::{library.define(schema)}" for schema in schemas_in(Path(spec.origin))]
        computed = [name for name in names if self._give_kernel(name, library)]
        for name in {*names} - {*computed}:
            # What was shipped for the host, or composes other operators, stays.
            if shipped is None or _has_kernel(name, "PrivateUse1"):
                library.impl(name.partition("::")[2], Missing(name), "PrivateUse1", allow_override=True)
        sys.stderr.write(
            f"npu_emulator: {spec.name} {done}; of its {len(names)} operators {len(computed)} have a kernel here\n"
        )

    def _give_kernel(self, name: str, library: torch.library.Library) -> bool:
        """Install the kernel of one operator if there is one, and metadata where the operator has none."""
        compute = self._registry.added.get(name) or self._registry.offered.get(name)
        if compute is None:
            return False
        self._installer.add(name, compute)
        if not _has_kernel(name, "Meta"):
            torch.library.register_fake(name, getattr(compute, "fake", compute), lib=library)
        return True


def _names(namespace: str) -> list[str]:
    every = torch._C._dispatch_get_all_op_names()  # noqa: SLF001 - no public list of operators
    return [name for name in every if name.startswith(f"{namespace}::")]


def _has_kernel(name: str, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, key)  # noqa: SLF001 - no public question


def _other_torch(distribution: str) -> str:
    """The release of torch that a distribution asks for, if it is another one; empty if not, or if it asks for none."""
    try:
        asked = map(Requirement, importlib.metadata.requires(distribution) or ())
    except importlib.metadata.PackageNotFoundError:
        return ""
    other = (one for one in asked if one.name == "torch" and torch.__version__ not in one.specifier)
    return next((f"its package is for {one}, this is {torch.__version__}" for one in other), "")


def install_loader(installer: Installer, registry: Registry, libraries: Path) -> None:
    """Handle imports of `EXTENSIONS` from now on; `libraries` is the folder of the runtime."""
    sys.meta_path.insert(0, _Loader(installer, registry, libraries))
