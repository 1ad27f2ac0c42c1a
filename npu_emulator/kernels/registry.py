"""Kernels from other packages: npu operators of torch_npu, and custom operators of any library.

A kernel is a plain function with the operator's signature that takes CPU tensors and returns CPU tensors. Packages offer a
mapping of such functions in the entry-point group `npu_emulator.kernels`; programs call `register_kernel`.

Instead of a function an offer may contain a record: any object with the function as `formula` (None: no kernel). Its other
attributes are optional. `first_factor` is the position of a matrix product's first factor among the tensors that it reads.
Three are functions of the operator's arguments, which a kernel's function may have as attributes too: `draws_random_numbers`
tells whether a call draws, `constraints` raises for a call that the device refuses, `work` returns the numbers of matrix
operations and of vector operations. A record's `refuse_on_device` takes the place of its `constraints`: its formula may compute
what the device would not. `across_ranks` is the generator function of an operator that communicates (`communicating`).
An offer with a method `listen(callback)` calls back with the name and record of each later operator.
"""

from __future__ import annotations

import functools
import importlib.metadata
import warnings
from collections.abc import Callable
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from npu_emulator.errors import KernelMissingError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch._ops import OpOverload

__all__ = ["BY_PROGRAMS", "CONSTRAINTS", "DRAWS", "GROUP", "RANKS", "WORK", "Registry", "overload_of"]

GROUP = "npu_emulator.kernels"
"""Entry-point group: each entry names a mapping from operator name (`npu::npu_rms_norm`) to function or record."""

DRAWS = "draws_random_numbers"
"""The attribute of a kernel: a function of a call's arguments that tells whether the call draws."""
CONSTRAINTS = "constraints"
"""The attribute of a kernel: a function that raises for arguments that the device refuses; they may be on the device."""
WORK = "work"
"""The attribute of a kernel: a function of a call's arguments that counts the operations."""
RANKS = "across_ranks"
"""The attribute of a kernel: the generator function of an operator that communicates; see `communicating`."""
_SAID = (DRAWS, CONSTRAINTS, WORK, RANKS, "writes", "returns_written", "fake")
"""Attributes of a record that the function itself may have too."""

BY_PROGRAMS: list[Callable[..., Any]] = []
"""The kernels that programs registered: each runs exactly when its operator runs."""

Kernel = Callable[..., Any]
Listener = Callable[[str, Kernel], None]


class Registry:
    """Kernels by operator name, and what to do when one is added after the device started."""

    def __init__(self) -> None:
        """Start empty."""
        self._kernels: dict[str, Kernel] = {}
        self._offered: dict[str, Kernel] = {}
        self._first_factors: dict[str, int] = {}
        self._listener: Listener | None = None

    def add(self, name: str, kernel: Kernel) -> None:
        """Add or replace the kernel of `namespace::operator` or `namespace::operator.overload`."""
        if not isinstance(name, str) or "::" not in name:
            raise ValueError(
                f"an operator is named 'namespace::operator' or 'namespace::operator.overload', got {name!r}"
            )
        if not callable(kernel):
            raise TypeError(f"the kernel of {name} must be a function of CPU tensors, got {type(kernel).__name__}")
        BY_PROGRAMS.append(kernel)
        self._kernels[name] = kernel
        if self._listener is not None:
            self._listener(name, kernel)

    def offer(self, name: str, kernel: Any) -> None:
        """Add a package's kernel, a function or a record. A kernel from `add` has precedence."""
        first_factor = getattr(kernel, "first_factor", None)
        if first_factor is not None:
            self._first_factors[name] = first_factor
        function = _function_of(kernel)
        if function is None:
            return
        self._offered[name] = function
        if self._listener is not None and name not in self._kernels:
            try:
                self._listener(name, function)
            except KernelMissingError as error:  # a program may describe an operator and never run it here
                warnings.warn(f"{error}\n{error.address}", RuntimeWarning, stacklevel=4)

    def take_offers(self) -> None:
        """Add the kernels that installed packages offer."""
        for entry in importlib.metadata.entry_points(group=GROUP):
            try:
                offered = entry.load()
                for name, kernel in offered.items():
                    self.offer(name, kernel)
                if hasattr(offered, "listen"):
                    offered.listen(self.offer)
            except Exception as error:  # noqa: BLE001 - another package's fault must not take `import torch` down with it
                warnings.warn(
                    f"the kernels that {entry.value} offers the emulated NPU cannot be loaded "
                    f"({type(error).__name__}: {error}); its operators will have none",
                    RuntimeWarning,
                    stacklevel=2,
                )

    @property
    def added(self) -> Mapping[str, Kernel]:
        """The kernels that programs added, by operator name."""
        return MappingProxyType(self._kernels)

    @property
    def offered(self) -> Mapping[str, Kernel]:
        """The kernels that packages offer, by operator name."""
        return MappingProxyType(self._offered)

    @property
    def first_factors(self) -> Mapping[str, int]:
        """For each matrix product offered, the position of its first factor among the tensors that it reads."""
        return MappingProxyType(self._first_factors)

    def listen(self, listener: Listener) -> None:
        """Call `listener` for each later kernel."""
        self._listener = listener


def overload_of(name: str) -> OpOverload | None:
    """The overload of a name `namespace::operator` or `namespace::operator.overload`; None if there is none."""
    import torch

    namespace, _, rest = name.partition("::")
    operator, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), operator, None)
    return getattr(packet, overload or "default", None) if packet is not None else None


def _function_of(kernel: Any) -> Kernel | None:
    """The function of a kernel that a package offers, with its record's functions as attributes."""
    function: Kernel | None = getattr(kernel, "formula", kernel)
    if function is None or function is kernel:
        return function
    said = {name: getattr(kernel, name, None) for name in _SAID}
    said[CONSTRAINTS] = getattr(kernel, "refuse_on_device", said[CONSTRAINTS])
    said = {name: value for name, value in said.items() if value}
    if not said:
        return function

    @functools.wraps(function)
    def with_attributes(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    vars(with_attributes).update(said)
    return with_attributes
