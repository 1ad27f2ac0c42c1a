"""How long a kernel takes at least: the largest of its memory, matrix and vector time, and what a launch costs.

The chip's figures and where they are from are in `npu_emulator.chips`. Two more are assumptions of ours, for want of a public
one: a task costs 2 us to start, and float32 products run at a quarter of float16's rate.

A matrix product is priced by the cube cores that its stream may use, everything else by the vector cores: one operation for
each element of the largest tensor, which is the least that it can be. A kernel that tells its work, such as attention, is priced
by the slower of both, which run side by side. A stream that is limited to some of the cores has, by
assumption, the whole bandwidth all the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from npu_emulator.chips import Chip

__all__ = ["LAUNCH_US", "Roofline", "bytes_of"]

LAUNCH_US = 2.0
"""Microseconds that starting a task costs."""
_FIRST_FACTORS: Mapping[str, int] = MappingProxyType(
    {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1}
)
"""torch's matrix products, and which tensor is the first factor: its last dimension is summed over."""
_RATE = {torch.int8: 2.0, torch.float16: 1.0, torch.bfloat16: 1.0, torch.float32: 0.25}
_NARROWEST = 2
"""Bytes of the narrowest element that vector units compute on: bytes are widened first."""


@dataclass(frozen=True)
class Roofline:
    """Modelled times on one chip.

    Attributes:
        chip: its figures.
        first_factors: the matrix products besides torch's own, and which tensor is the first factor.
    """

    chip: Chip
    first_factors: Mapping[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The chip and its size."""
        return f"{self.chip.name}, {self.chip.cube_cores} cube cores"

    def kernel_us(
        self,
        name: str,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        *,
        work: tuple[float, float] | None = None,
        cube_cores: int | None = None,
        vector_cores: int | None = None,
    ) -> float:
        """Return the modelled microseconds of a kernel by what it reads and writes, on so many of the cores or on all.

        `work` holds the operations of its matrix products and those on single elements, for a kernel that tells them.
        """
        chip = self.chip
        moved = sum(bytes_of(tensor) for tensor in (*reads, *writes))
        product = self._product_operations(name, reads, writes)
        elements = 0.0 if product is not None else max(map(_computed_bytes, (*reads, *writes)), default=0)
        if work is not None:
            product = work[0] / (_RATE.get(reads[0].dtype, 0.25) if reads else 1.0)
            elements = work[1] * (max(reads[0].element_size(), _NARROWEST) if reads else _NARROWEST)
        cubes = (chip.cube_cores if cube_cores is None else cube_cores) / chip.cube_cores
        vectors = (chip.vector_cores if vector_cores is None else vector_cores) / chip.vector_cores
        arithmetic = max((product or 0.0) / (chip.half_flops * cubes), elements / (chip.vector_bytes * vectors))
        return LAUNCH_US + 1e6 * max(moved / chip.bandwidth, arithmetic)

    def copy_us(self, moved: int) -> float:
        """Return the modelled microseconds of moving or filling `moved` bytes."""
        return LAUNCH_US + 1e6 * moved / self.chip.bandwidth

    def _product_operations(
        self, name: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]
    ) -> float | None:
        """Return the operations of a matrix product as if they were in float16; None for what is no product."""
        operator = "::".join(name.split(".")[:2])
        position = self.first_factors.get(operator, _FIRST_FACTORS.get(operator))
        if position is None or position >= len(reads) or not writes:
            return None
        factor = reads[position]
        return 2.0 * writes[0].numel() * factor.shape[-1] / _RATE.get(factor.dtype, 0.25)


def bytes_of(tensor: torch.Tensor) -> int:
    """Return how many bytes a tensor stands on: an expanded one is read once."""
    kept = [extent for extent, step in zip(tensor.size(), tensor.stride(), strict=True) if step != 0]
    return 0 if tensor.numel() == 0 else math.prod(kept) * tensor.element_size()


def _computed_bytes(tensor: torch.Tensor) -> int:
    """Return how many bytes vector units go through for a tensor: an expanded one is computed on in full."""
    return tensor.numel() * max(tensor.element_size(), _NARROWEST)
