"""Kernels that others bring: npu operators of torch_npu, and custom operators of any library.

A kernel is a plain function with the operator's signature that takes CPU tensors and returns CPU tensors. Packages name a
mapping of such functions in the entry-point group `npu_emulator.kernels`; programs call `register_kernel`.
"""

from __future__ import annotations

import importlib.metadata
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["GROUP", "Registry", "installed_kernels"]

GROUP = "npu_emulator.kernels"
"""Entry-point group: each entry names a mapping from operator name (`npu::npu_rms_norm`) to function."""


class Registry:
    """Kernels by operator name, and what to do when one is added after the device started."""

    def __init__(self) -> None:
        """Start empty."""
        self._kernels: dict[str, Callable[..., Any]] = {}
        self._listener: Callable[[str, Callable[..., Any]], None] | None = None

    def add(self, name: str, kernel: Callable[..., Any]) -> None:
        """Add or replace the kernel of `namespace::operator` or `namespace::operator.overload`."""
        if "::" not in name:
            raise ValueError(
                f"an operator is named 'namespace::operator' or 'namespace::operator.overload', got {name!r}"
            )
        if not callable(kernel):
            raise TypeError(f"the kernel of {name} must be a function of CPU tensors, got {type(kernel).__name__}")
        self._kernels[name] = kernel
        if self._listener is not None:
            self._listener(name, kernel)

    def items(self) -> Mapping[str, Callable[..., Any]]:
        """Return all kernels by name."""
        return dict(self._kernels)

    def listen(self, listener: Callable[[str, Callable[..., Any]], None]) -> None:
        """Call `listener` for each kernel added from now on."""
        self._listener = listener


def installed_kernels() -> dict[str, Callable[..., Any]]:
    """Load the kernels that installed packages offer."""
    found: dict[str, Callable[..., Any]] = {}
    for entry in importlib.metadata.entry_points(group=GROUP):
        try:
            found.update(entry.load())
        except Exception as error:  # noqa: BLE001 - another package's fault must not take `import torch` down with it
            warnings.warn(
                f"the kernels that {entry.value} offers the emulated NPU cannot be loaded ({type(error).__name__}: {error}); "
                "its operators will have none",
                RuntimeWarning,
                stacklevel=2,
            )
    return found
