"""Where a tensor lies in memory."""

from __future__ import annotations

import torch

__all__ = ["extent_bytes", "meet"]


def extent_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes from a tensor's first element to its last, gaps included."""
    if tensor.is_contiguous():
        return tensor.nbytes
    if tensor.numel() == 0:
        return 0
    last = sum((extent - 1) * step for extent, step in zip(tensor.size(), tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def meet(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether the extents of two tensors have a byte in common."""
    first, second = sorted((left, right), key=torch.Tensor.data_ptr)
    return second.data_ptr() < first.data_ptr() + extent_bytes(first)
