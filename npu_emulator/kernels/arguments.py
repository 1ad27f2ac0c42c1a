"""One pass over an operator's arguments: CPU tensors on the same memory, the key of the output's metadata, the device.

It runs for every operator, so it visits each argument once and does not use pytrees.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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
    """A hashable key of everything on which the output's metadata may depend. None if an argument has an unknown type."""
    device: int
    """Index of the first device tensor's device, else of a device argument, else -1."""
    reads: list[torch.Tensor]
    """The CPU tensors on device memory."""
    mixed: bool
    """Whether tensors of the device and of the host are mixed, apart from scalar tensors of the host."""


def is_npu(value: object) -> bool:
    """Tell whether a value is a tensor on the emulated device."""
    return isinstance(value, torch.Tensor) and value.device.type == "npu"


def bind(args: tuple[Any, ...], kwargs: dict[str, Any], view: Callable[[torch.Tensor], torch.Tensor]) -> Bound:
    """Convert the arguments of one launch, taking CPU tensors from `view`."""
    walk = _Walk(view)
    cpu_args = walk.convert_all(args)
    cpu_kwargs = {}
    if kwargs:
        walk.parts.extend(kwargs)
        cpu_kwargs = dict(zip(kwargs, walk.convert_all(tuple(kwargs.values())), strict=True))
    device = walk.device if walk.device >= 0 else walk.asked
    return Bound(
        tuple(cpu_args),
        cpu_kwargs,
        tuple(walk.parts) if walk.known else None,
        device,
        walk.reads,
        walk.device >= 0 and walk.host,
    )


class _Walk:
    __slots__ = ("asked", "device", "host", "known", "parts", "reads", "view")

    def __init__(self, view: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.view = view
        self.parts: list[Any] = []
        self.reads: list[torch.Tensor] = []
        self.device = -1
        self.asked = -1
        self.host = False
        self.known = True

    def convert_all(self, values: Sequence[Any]) -> list[Any]:
        """Return the CPU form of several arguments; one loop, because every launch comes through here."""
        converted = []
        parts = self.parts
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
            self.parts.append(kinds)
            if _SCALARS.issuperset(kinds):  # a shape, a permutation, a mask
                self.parts.append(tuple(value))
                return list(value)
            return self.convert_all(value)
        if type(value) is torch.device:
            self.parts.append(value.type)
            if value.type == "npu" and value.index is not None and self.asked < 0:
                self.asked = value.index
            return _CPU if value.type == "npu" else value
        self.known = False
        return value

    def _tensor(self, value: torch.Tensor) -> torch.Tensor:
        index = value.get_device()  # -1 on the host; much cheaper than the device object
        on_device = index >= 0
        # A CPU scalar tensor promotes differently from a device tensor, so its device is part of the key.
        self.parts.extend((value.dtype, value.size(), value.stride(), on_device))
        if not on_device:
            self.host = self.host or value.dim() > 0
            return value.clone()  # read now, as on hardware: the program may change it before the kernel runs
        if self.device < 0:
            self.device = index
        seen = self.view(value)
        self.reads.append(seen)
        return seen
