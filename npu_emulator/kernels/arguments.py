"""One pass over an operator's arguments: CPU tensors on the same memory, the key of the output's metadata, the device.

It runs for every operator, so it visits each argument once and does not use pytrees.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Bound", "Form", "is_npu"]

_CPU = torch.device("cpu")
_SCALARS = frozenset({int, float, bool, str, type(None), torch.dtype, torch.layout, torch.memory_format, complex})

Form = tuple[torch.dtype, torch.Size, tuple[int, ...]]
"""A tensor's dtype, sizes and strides."""


def is_npu(value: object) -> bool:
    """Tell whether a value is a tensor on the emulated device."""
    return isinstance(value, torch.Tensor) and value.device.type == "npu"


class Bound:
    """The arguments of one launch. One object walks over them and keeps what it finds, because each launch makes one."""

    __slots__ = ("_asked", "_host", "_known", "_parts", "_view", "args", "device", "key", "kwargs", "mixed", "reads")

    def __init__(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], view: Callable[[torch.Tensor, Form], torch.Tensor]
    ) -> None:
        """Convert them, taking CPU tensors from `view`."""
        self._view = view
        self._parts: list[Any] = []
        self._asked = -1
        self._host = False
        self._known = True
        self.reads: list[torch.Tensor] = []
        """The CPU tensors on device memory."""
        self.device = -1
        """Index of the first device tensor's device, else of a device argument, else -1."""
        self.args = tuple(self._convert_all(args))
        """Positional arguments with device tensors replaced by CPU tensors on the same memory, and the device by the CPU."""
        self.kwargs = kwargs
        """Keyword arguments, likewise."""
        if kwargs:
            self._parts.extend(kwargs)
            self.kwargs = dict(zip(kwargs, self._convert_all(tuple(kwargs.values())), strict=True))
        self.key = tuple(self._parts) if self._known else None
        """A hashable key of everything on which the output's metadata may depend. None if an argument has an unknown type."""
        self.mixed = self.device >= 0 and self._host
        """Whether tensors of the device and of the host are mixed, apart from scalar tensors of the host."""
        if self.device < 0:
            self.device = self._asked

    def ignore_first(self) -> None:
        """Count the first argument, a tensor, as not read."""
        if self.reads and self.reads[0] is self.args[0]:
            del self.reads[0]

    def _convert_all(self, values: Sequence[Any]) -> list[Any]:
        """Return the CPU form of several arguments; one loop, because every launch comes through here."""
        converted = []
        parts = self._parts
        for value in values:
            kind = type(value)
            if kind in _SCALARS:
                parts.append(kind)  # 1, 1.0 and True are equal in Python and promote differently
                parts.append(value)
                converted.append(value)
            elif isinstance(value, torch.Tensor):
                converted.append(self._tensor(value))
            else:
                converted.append(self._other(value))
        return converted

    def _other(self, value: Any) -> Any:
        """Convert an argument that is neither a number nor a tensor."""
        if isinstance(value, (list, tuple)):  # torch.Size and named tuples included
            kinds = tuple(map(type, value))
            self._parts.append(kinds)
            if _SCALARS.issuperset(kinds):  # a shape, a permutation, a mask
                self._parts.append(tuple(value))
                return list(value)
            return self._convert_all(value)
        if type(value) is torch.device:
            self._parts.append(value.type)
            if value.type == "npu" and value.index is not None and self._asked < 0:
                self._asked = value.index
            return _CPU if value.type == "npu" else value
        self._known = False
        return value

    def _tensor(self, value: torch.Tensor) -> torch.Tensor:
        index = value.get_device()  # -1 on the host; much cheaper than the device object
        on_device = index >= 0
        # A CPU scalar tensor promotes differently from a device tensor, so its device is part of the key.
        form = (value.dtype, value.size(), value.stride())
        self._parts.extend((form, on_device))
        if not on_device:
            self._host = self._host or value.dim() > 0
            return value.clone()  # read now, as on hardware: the program may change it before the kernel runs
        if self.device < 0:
            self.device = index
        seen = self._view(value, form)
        self.reads.append(seen)
        return seen
