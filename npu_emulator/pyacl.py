"""CANN's Python module `acl` (pyACL), for programs that import it: with exactly the functions of the emulated device.

An installed real `acl` has precedence.
"""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

    from npu_emulator.device import Runtime

__all__ = ["offer_pyacl"]


class _PyAcl(MetaPathFinder, Loader):
    """Finds and fills the modules."""

    def __init__(self, runtime: Runtime) -> None:
        self._functions: dict[str, dict[str, Callable[..., int]]] = {"acl": {}, "acl.rt": {"memcpy": runtime.memcpy}}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Describe one of the modules."""
        del path, target
        if fullname not in self._functions:
            return None
        return ModuleSpec(fullname, self, origin=f"the emulated device, {__file__}", is_package=fullname == "acl")

    def exec_module(self, module: ModuleType) -> None:
        """Give a module its functions, and an error that names what it lacks."""
        name = module.__name__

        def missing(attribute: str) -> object:
            raise AttributeError(
                f"{name}.{attribute} is a function of CANN's Python module, which is not installed; "
                f"in its place stands the emulated device's, which has no {attribute}"
            )

        module.__doc__ = "pyACL of the emulated device (npu_emulator); no NPU is used."
        module.__file__ = __file__
        module.__dict__.update(self._functions[name], __getattr__=missing)


def offer_pyacl(runtime: Runtime) -> None:
    """Let `import acl` find the emulated device's module where no other is installed."""
    sys.meta_path.append(_PyAcl(runtime))
