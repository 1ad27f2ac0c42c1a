"""Checks that a kernel touches only allocated memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from npu_emulator.extents import extent_bytes
from npu_emulator.plurals import counted

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from npu_emulator.device import Runtime

__all__ = ["INVALID_ADDRESS", "first_outside"]

INVALID_ADDRESS = 507011
"""The error code of a graph that touches freed device memory (ACL_ERROR_RT_MODEL_EXECUTE)."""


def first_outside(runtime: Runtime, tensors: Iterable[torch.Tensor]) -> str | None:
    """Return a sentence about the first tensor that lies outside every live allocation of a device, or None."""
    for tensor in tensors:
        if tensor.numel() == 0:
            continue
        size = extent_bytes(tensor)
        if runtime.is_outside_allocations(tensor.data_ptr(), size):
            return (
                f"it touches {counted(size, 'byte')} at {tensor.data_ptr():#x}, which no live allocation holds: "
                "the memory was freed, or the access goes past its end. "
                "Keep alive the tensors that a captured graph or a weak reference uses; "
                "NPU_EMULATOR_CHECK_MEMORY=1 says where they were allocated"
            )
    return None
