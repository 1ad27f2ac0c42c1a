"""CPU tensors on the memory of device tensors: what a kernel's body computes on."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from npu_emulator.errors import EmulatorError, address_of
from npu_emulator.extents import extent_bytes
from npu_emulator.frames import said_line
from npu_emulator.memory.bounds import INVALID_ADDRESS

if TYPE_CHECKING:
    from npu_emulator.device import Runtime
    from npu_emulator.kernels.arguments import Form
    from npu_emulator.kernels.metadata import Like

__all__ = ["Views"]

_KEPT = 16384


class Views:
    """Makes the views, and keeps those that are asked for again and again.

    Each view is compared with the allocations when it is made. After a free the kept ones may lie in memory that is no longer
    allocated, so all are forgotten and made again.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._flat: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        self._shared: dict[tuple[int, Form], torch.Tensor] = {}
        self._outputs: dict[tuple[int, Like], torch.Tensor] = {}
        self._bases: dict[int, int] = {}
        self._suspicious = False  # a view of memory that is not allocated
        self._frees = 0  # the number of frees when the kept views were made

    def may_be_freed(self) -> bool:
        """Tell whether a view may lie in memory that is not allocated."""
        return self._suspicious or self._runtime.frees() != self._frees

    def forget(self) -> None:
        """Forget the kept views."""
        self._frees = self._runtime.frees()
        self._shared.clear()
        self._outputs.clear()
        self._suspicious = False

    def of(self, tensor: torch.Tensor, form: Form | None = None) -> torch.Tensor:
        """Return a CPU tensor of the same dtype, shape and strides (`form`, if it is known) on a device tensor's memory."""
        address = tensor.data_ptr()
        dtype, size, stride = form or (tensor.dtype, tensor.size(), tensor.stride())
        device = tensor.device.index
        flat = self._flat.get((device, dtype))
        if flat is None:
            flat = self._flatten(device, dtype)
        place = (address - self._bases[device]) // dtype.itemsize
        if not 0 <= place < flat.numel():  # memory of the host that the device maps (`empty_with_swapped_memory`)
            storage = tensor.untyped_storage()
            if storage.data_ptr() == 0:
                if not tensor.numel():
                    return torch.empty_strided(size, stride, dtype=dtype)
                raise RuntimeError(
                    f"a kernel cannot run: it touches {extent_bytes(tensor)} bytes at {address:#x}, because the storage of a "
                    f"tensor of {list(tensor.shape)} has no memory: `untyped_storage().resize_(0)` gave it back "
                    f"(ACL error {INVALID_ADDRESS}){said_line()}\n{address_of(INVALID_ADDRESS)}"
                )
            whole = storage.nbytes() // dtype.itemsize * dtype.itemsize
            flat, place = _memory_at(storage.data_ptr(), whole, dtype), int(tensor.storage_offset())
        view = flat.as_strided(size, stride, place)
        if self._runtime.is_outside_allocations(address, 1):  # torch ensures that a tensor stays inside its storage
            self._suspicious = True
        if dtype.is_complex and tensor.is_conj():
            view = view.conj()
        return torch._neg_view(view) if tensor.is_neg() else view  # noqa: SLF001 - as above: a flag of the view, not of the memory

    def shared(self, tensor: torch.Tensor, form: Form | None = None) -> torch.Tensor:
        """Return a cached view, the same object for equal memory and metadata. The caller must not resize it."""
        form = form or (tensor.dtype, tensor.size(), tensor.stride())
        if form[0].is_complex or tensor.is_neg():
            return self.of(tensor, form)
        key = (tensor.data_ptr(), form)
        found = self._shared.get(key)
        if found is None:
            found = self.of(tensor, form)
            if len(self._shared) >= _KEPT:
                self._shared.clear()
            if key[0] != 0:
                self._shared[key] = found
        return found

    def of_output(self, tensor: torch.Tensor, like: Like) -> torch.Tensor:
        """Return the cached view of a tensor just allocated as `like`, which has no flags, so that the key is cheap."""
        key = (tensor.data_ptr(), like)
        found = self._outputs.get(key)
        if found is None:
            found = self.of(tensor)
            if len(self._outputs) >= _KEPT:
                self._outputs.clear()
            if key[0] != 0:
                self._outputs[key] = found
        return found

    def _flatten(self, device: int, dtype: torch.dtype) -> torch.Tensor:
        """Make the one CPU tensor that covers a device's whole memory in one dtype."""
        base, size = self._runtime.arena(device)
        if size == 0:
            raise EmulatorError(
                "the address space for the emulated device could not be reserved; lower NPU_EMULATOR_MEMORY_GB "
                "or lift the process's address-space limit (`ulimit -v unlimited`)"
            )
        self._bases[device] = base
        flat = self._flat[device, dtype] = _memory_at(base, size, dtype)
        return flat


def _memory_at(address: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the CPU tensor of a dtype that covers memory; no inference tensor, since it outlives the caller's mode."""
    memory = (ctypes.c_char * size).from_address(address)
    with torch._C._AutoDispatchBelowAutograd(), torch.inference_mode(False):  # noqa: FBT003, SLF001 - no tracing of our own plumbing
        return torch.frombuffer(memory, dtype=torch.uint8).view(dtype)
