"""One pass over an operator's arguments: CPU tensors on the same memory, what output metadata depends on, which device.

It runs for every operator, so it looks at each argument once and takes no detour through pytrees.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Bound", "bind", "is_npu"]

_CPU = torch.device("cpu")
_SCALARS = frozenset({int, float, bool, str, type(None), torch.dtype, torch.layout, torch.memory_format, complex})


class Bound(NamedTuple):
    """The arguments of one launch."""

    args: tuple[Any, ...]
    """Positional arguments with device tensors replaced by CPU tensors on the same memory, and the device by the CPU."""
    kwargs: dict[str, Any]
    """Keyword arguments, likewise."""
    key: Any
    """Hashable: all that the operator's output metadata may depend on. None if an argument is of an unknown kind."""
    device: int
    """Index of the first device tensor's device, else of the device asked for, else -1."""
    reads: list[torch.Tensor]
    """The CPU tensors that lie on device memory."""


def is_npu(value: object) -> bool:
    """Tell whether a value is a tensor on the emulated device."""
    return isinstance(value, torch.Tensor) and value.device.type == "npu"


def bind(args: tuple[Any, ...], kwargs: dict[str, Any], view: Callable[[torch.Tensor], torch.Tensor]) -> Bound:
    """Convert the arguments of one launch, taking CPU tensors from `view`."""
    walk = _Walk(view)
    convert = walk.convert
    cpu_args = tuple([convert(value) for value in args])
    cpu_kwargs = {}
    for name, value in kwargs.items():
        walk.parts.append(name)
        cpu_kwargs[name] = convert(value)
    device = walk.device if walk.device >= 0 else walk.asked
    return Bound(cpu_args, cpu_kwargs, tuple(walk.parts) if walk.known else None, device, walk.reads)


class _Walk:
    __slots__ = ("asked", "device", "known", "parts", "reads", "view")

    def __init__(self, view: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.view = view
        self.parts: list[Any] = []
        self.reads: list[torch.Tensor] = []
        self.device = -1
        self.asked = -1
        self.known = True

    def convert(self, value: Any) -> Any:
        """Return the CPU form of one argument and note what it tells."""
        kind = type(value)
        if kind in _SCALARS:
            self.parts.append(kind)  # 1, 1.0 and True are equal in Python and promote differently
            self.parts.append(value)
            return value
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if kind is list or kind is tuple:
            self.parts.append(len(value))
            return [self.convert(item) for item in value]
        if kind is torch.device:
            self.parts.append(value.type)
            if value.type == "npu" and value.index is not None and self.asked < 0:
                self.asked = value.index
            return _CPU if value.type == "npu" else value
        if isinstance(value, (list, tuple)):  # torch.Size and named tuples
            return self.convert(list(value))
        self.known = False
        return value

    def _tensor(self, value: torch.Tensor) -> torch.Tensor:
        index = value.get_device()  # -1 on the host; far cheaper than asking for the device object
        on_device = index >= 0
        # A CPU scalar tensor promotes differently from a device tensor, so where it lies is part of the key.
        self.parts.extend((value.dtype, value.size(), value.stride(), on_device))
        if not on_device:
            return value
        if self.device < 0:
            self.device = index
        seen = self.view(value)
        self.reads.append(seen)
        return seen
