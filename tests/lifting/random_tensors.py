"""Random inputs of the tests of lifting."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def tensors(shapes: Sequence[Sequence[int]], dtype: torch.dtype, seed: int = 1) -> list[torch.Tensor]:
    """Random tensors on the device."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype).npu() for shape in shapes]
