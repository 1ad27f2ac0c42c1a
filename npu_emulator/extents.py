"""Where a tensor lies in memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["bytes_of_extent", "extent_bytes", "meet"]


def extent_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes from a tensor's first element to its last, gaps included."""
    if tensor.is_contiguous():
        return tensor.nbytes
    return bytes_of_extent(tensor.size(), tensor.stride(), tensor.element_size())


def bytes_of_extent(size: Sequence[int], stride: Sequence[int], itemsize: int) -> int:
    """Return `extent_bytes` of a tensor of this geometry."""
    if 0 in size:
        return 0
    last = sum((extent - 1) * step for extent, step in zip(size, stride, strict=True))
    return (last + 1) * itemsize


def meet(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether the extents of two tensors have a byte in common."""
    first, second = sorted((left, right), key=torch.Tensor.data_ptr)
    return second.data_ptr() < first.data_ptr() + extent_bytes(first)
