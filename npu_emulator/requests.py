"""What a kernel is about to allocate: the allocator reports an address alone, and torch_npu takes long to tell the size."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from npu_emulator.extents import bytes_of_extent

__all__ = ["allocate", "take_requested"]


class _Requested(threading.local):
    """The allocator reports in the thread that allocates."""

    size = 0


_requested = _Requested()


def allocate(
    size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device | str | None
) -> torch.Tensor:
    """`torch.empty_strided`, for which the allocator's listener needs not ask how many bytes it takes."""
    _requested.size = bytes_of_extent(size, stride, dtype.itemsize)
    try:
        return torch.empty_strided(size, stride, dtype=dtype, device=device)
    finally:
        _requested.size = 0


def take_requested() -> int:
    """The bytes of the allocation that this thread has just made, told once; 0 where nobody said how many they are."""
    size, _requested.size = _requested.size, 0
    return size
