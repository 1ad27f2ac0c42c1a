"""The bytes of device memory that are unwritten since their allocation: a shadow byte for each byte.

The runtime keeps it (runtime/shadow.cpp), so that its own copies and fills count as writes; this module makes tensors on the
shadow with the layout of views on the memory.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from npu_emulator.errors import EmulatorError

if TYPE_CHECKING:
    from npu_emulator.device import Runtime

__all__ = ["Shadow"]


class Shadow:
    """The shadow of every device."""

    def __init__(self, runtime: Runtime, devices: int) -> None:
        """Reserve the address space; pages are taken as memory is marked."""
        self._arenas: list[tuple[int, int, torch.Tensor]] = []
        for device in range(devices):
            base, size = runtime.arena(device)
            address = runtime.shadow(device)
            if address == 0:
                raise EmulatorError(
                    "the address space for checking memory could not be reserved; lower NPU_EMULATOR_MEMORY_GB"
                )
            memory = (ctypes.c_char * size).from_address(address)
            self._arenas.append((base, base + size, torch.frombuffer(memory, dtype=torch.uint8)))

    def over(self, view: torch.Tensor) -> torch.Tensor | None:
        """Return the shadow of a CPU view of device memory, uint8 [*view.shape, itemsize]; None for host memory."""
        address, width = view.data_ptr(), view.element_size()
        for base, end, flat in self._arenas:
            if base <= address < end:
                strides = [step * width for step in view.stride()]
                return flat.as_strided((*view.shape, width), (*strides, 1), address - base)
        return None
